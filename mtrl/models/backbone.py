"""A model of any supported family as two verbs: `see` (images to features) and `read` (tokens to hidden states).

Everything above works on these: scoring sampled tokens (`forward.py`) and generating them (`rollout/local.py`). Images
are seen once a prompt and view, however many rows read them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import DynamicCache as Cache
from transformers import PreTrainedModel
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from mtrl.models.adapters import adapter_parameters
from mtrl.models.device_copy import to_device
from mtrl.models.masked_attention import ATTENTION, CAUSAL, FLEX_COLUMNS, AttentionReader, DocumentMask, use_attention
from mtrl.models.model_size import head_width
from mtrl.models.parallel.fsdp import compute_device
from mtrl.models.parallel.ranks import SINGLE_PROCESS, Ranks
from mtrl.models.parallel.sequence import NO_SEQUENCE_PARALLEL, SequenceParallelGroup, unshareable_heads
from mtrl.models.patches import (
    use_compiled_pieces,
    use_linear_patches,
    use_narrow_adapters,
    use_no_dropout,
    use_padded_mlps,
    use_segment_attention,
)
from mtrl.types import VISION_POOL, Prompt

Grid = tuple[int, int, int]
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
CACHED_IMAGES = 512  # entries of some 100 kB each for large images
CACHED_BATCHES = 16  # entries of some 10 MB each for hundreds of large images, on the device
SHARED_PREFIX_FAMILIES = ("qwen2", "qwen3", "llama", "mistral", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # tested
LOGITS_CHANGED_BY = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


@dataclass(frozen=True, eq=False)
class Features:
    """What the vision tower makes of one prompt's images: [image tokens, H], and the same for each deepstack layer."""

    embeds: Tensor
    deepstack: tuple[Tensor, ...] = ()

    def rows(self, chosen: Tensor) -> Features:
        """Those of some of the image tokens, by their numbers."""
        return Features(self.embeds[chosen], tuple(layer[chosen] for layer in self.deepstack))


class Backbone:
    """`model` is a Hugging Face causal model of a family in `models/families`; its weights stay the caller's.

    `compute_dtype` is what products are taken in; weights, or adapters alone, may be kept wider (float32 master
    weights). Adapters must be there already. `compiled` puts compiled norms, MLPs and rotary positions in place, which
    pays where a model is large. A model may be split over `ranks` (`sharding.py`), which then make every pass together.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        compute_dtype: torch.dtype | None = None,
        *,
        compiled: bool = False,
        ranks: Ranks = SINGLE_PROCESS,
    ) -> None:
        check_supported(model)
        self.model, self.ranks = model, ranks
        self.compute_dtype = compute_dtype or model.dtype
        self.vision_tower: Any = getattr(model.model, "visual", None)
        self.language_model: Any = getattr(model.model, "language_model", model.model)
        use_attention(self.language_model)
        use_no_dropout(model)
        self.wide_adapters = any(
            each.dtype.itemsize > self.compute_dtype.itemsize for each in adapter_parameters(model).values()
        )
        if self.wide_adapters:
            use_narrow_adapters(model)
        if self.vision_tower is not None:
            use_segment_attention(self.vision_tower)
            use_linear_patches(self.vision_tower)
            if self.device.type == "cuda" and self.compute_dtype.itemsize == 2:
                use_padded_mlps(self.vision_tower)
            self.vision_indices = VisionIndices(self.vision_tower)
        if compiled:
            use_compiled_pieces(model)

    @property
    def device(self) -> torch.device:
        return compute_device(self.model)

    @property
    def output_matrix(self) -> Tensor:
        """The output matrix [V, H], as `algorithms.vocab` wants it."""
        return self.model.get_output_embeddings().weight

    def encode_images(self, inputs: Sequence[dict[str, Tensor]]) -> list[Features | None]:
        """Features of each prompt's images, from `PromptEncoder.inputs`; all images in one pass."""
        seen = [i for i, prompt in enumerate(inputs) if "pixel_values" in prompt]
        features: list[Features | None] = [None] * len(inputs)
        if not seen:
            if self.vision_tower is not None and self.ranks.any_rank(False):
                features[0] = self.dummy_vision_pass()
            return features
        self.ranks.any_rank(True)
        assert self.vision_tower is not None, "a text model was given an image"
        grids = tuple(tuple(grid) for i in seen for grid in inputs[i]["image_grid_thw"].tolist())
        output = self.run_tower(torch.cat([inputs[i]["pixel_values"] for i in seen]), grids)
        merged = self.vision_tower.spatial_merge_size**2
        sizes = [int(inputs[i]["image_grid_thw"].prod(1).sum()) // merged for i in seen]
        layers = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        by_prompt = zip(*(layer.split(sizes) for layer in layers), strict=True)
        for i, (embeds, *deepstack) in zip(seen, by_prompt, strict=True):
            features[i] = Features(embeds, tuple(deepstack))
        return features

    def select_images(self, inputs: dict[str, Tensor], tokens: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The inputs of those images of a prompt that hold some of these image tokens; and for every image token of the
        prompt its number among theirs."""
        if not len(tokens):
            return {}, torch.empty(0, dtype=torch.long)
        grids = inputs["image_grid_thw"].cpu()
        patches = grids.prod(1)
        image_of = torch.arange(len(patches)).repeat_interleave(patches // self.vision_tower.spatial_merge_size**2)
        wanted = torch.zeros(len(patches), dtype=torch.bool)
        wanted[image_of[tokens]] = True
        pixels = inputs["pixel_values"]
        chosen = to_device(wanted.repeat_interleave(patches), pixels.device)
        return {"pixel_values": pixels[chosen], "image_grid_thw": grids[wanted]}, wanted[image_of].cumsum(0) - 1

    def dummy_vision_pass(self) -> Features:
        """Other ranks see images, and a tower that is split runs on all ranks or on none: it runs over one blank image,
        of which no token is taken. The tower's gradients are zeros, and are there."""
        tower = self.vision_tower
        width = tower.patch_embed.proj.weight[0].numel()
        side = tower.spatial_merge_size
        output = self.run_tower(torch.zeros(side * side, width), ((1, side, side),))
        layers = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        embeds, *deepstack = (layer[:0] for layer in layers)
        return Features(embeds, tuple(deepstack))

    def run_tower(self, pixels: Tensor, grids: tuple[Grid, ...]) -> Any:
        """The vision tower over all patches of images of these grids."""
        with self._precision():
            return self.vision_tower(
                pixels.to(self.device, self.vision_tower.dtype),
                grid_thw=torch.tensor(grids),
                **self.vision_indices(grids, self.device),
            )

    def forward_text(
        self,
        ids: Tensor,
        positions: Tensor,
        is_vision: Tensor | None = None,
        features: Sequence[Features | None] = (),
        attention_mask: Tensor | BlockMask | None = None,
        cache: Cache | None = None,
        reader: AttentionReader | None = None,
        sharers: SequenceParallelGroup = NO_SEQUENCE_PARALLEL,
    ) -> Tensor:
        """Hidden states [B, S, H] of ids [B, S] at positions [3, B, S].

        `is_vision` [B, S] marks where the rows' features go, in their order. Without `attention_mask` ([B, 1, S, keys]
        bool, or blocks) attention is causal, which is all that right-padded rows need. Where `sharers` hold a part of
        each sequence, S is this rank's, and the mask is that of whole sequences.
        """
        embeds = self.model.get_input_embeddings()(ids).to(self.compute_dtype)
        extra: dict[str, Any] = {} if reader is None else {"reader": reader}
        if sharers.size > 1:
            assert self.own_attention, "ranks that share sequences attend by `models/masked_attention.py`"
            attention_mask = CAUSAL if attention_mask is None else attention_mask
            extra["sharers"] = sharers
        given = [row for row in features if row is not None]
        if given:
            assert is_vision is not None
            image = torch.cat([row.embeds for row in given]).to(embeds.dtype)
            embeds = embeds.masked_scatter(is_vision[..., None], image)
            if given[0].deepstack:
                extra["visual_pos_masks"] = is_vision
                extra["deepstack_visual_embeds"] = [
                    torch.cat(layers) for layers in zip(*(row.deepstack for row in given), strict=True)
                ]
        with self._precision():
            output = self.language_model(
                inputs_embeds=embeds,
                position_ids=positions[0] if self.vision_tower is None else positions,
                attention_mask=None if attention_mask is None else self._as_mask(attention_mask, embeds.dtype),
                past_key_values=cache,
                use_cache=cache is not None,
                **extra,
            )
        return output.last_hidden_state.to(self.compute_dtype)

    def new_cache(self) -> Cache:
        """Keys and values of what `read` has read, for reading on."""
        return Cache(config=self.language_model.config)

    def _precision(self) -> torch.autocast:
        narrower = self.compute_dtype != self.model.dtype or self.wide_adapters
        return torch.autocast(self.device.type, dtype=self.compute_dtype, enabled=narrower)

    @property
    def attention_name(self) -> str:
        """The attention implementation as the user chose it."""
        return "sdpa" if self.own_attention else self.language_model.config._attn_implementation

    @property
    def own_attention(self) -> bool:
        """Whether the language model attends by `models/masked_attention.py`, which reads every mask and every mass."""
        return self.language_model.config._attn_implementation == ATTENTION

    @property
    def packs(self) -> bool:
        """Whether all may stand in one sequence without padding: there must be a kernel that takes the model's heads,
        and, as for a shared prefix, position and mask must say all."""
        wide_enough = head_width(self.language_model.config) >= FLEX_COLUMNS
        kernel = self.own_attention and self.device.type == "cuda" and wide_enough
        return kernel and self.shares_prefixes

    @property
    def shares_prefixes(self) -> bool:
        """Whether responses of a group may follow one copy of their prompt: position and mask must say all."""
        readable = self.own_attention or self.language_model.config._attn_implementation == "eager"
        return readable and self.model.config.model_type in SHARED_PREFIX_FAMILIES

    def sight_mask(self, sight: DocumentMask, packed: bool) -> Tensor | BlockMask:
        """The mask as the kernels of this device want it: blocks for one packed sequence, else a matrix for each."""
        if packed and self.device.type == "cuda":
            return sight.blocks(self.device)
        return sight.dense().to(self.device)

    def _as_mask(self, mask: Tensor | BlockMask, dtype: torch.dtype) -> Tensor | BlockMask:
        """The mask as the attention implementation reads it: `eager` would add a bool mask to the scores."""
        if self.own_attention or isinstance(mask, BlockMask):
            return mask
        implementation = self.language_model.config._attn_implementation
        if implementation == "eager":
            return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        raise ValueError(f"attn_implementation {implementation!r} takes no mask of ours; set sdpa or eager")


def check_supported(model: PreTrainedModel) -> None:
    """Refuses what `read` and `output_matrix` would get silently wrong."""
    config: Any = model.config.get_text_config()
    head: Any = model.get_output_embeddings()
    reasons = [name for name in LOGITS_CHANGED_BY if getattr(config, name, None) not in (None, 1.0)]
    if not hasattr(model, "model"):
        reasons.append("its layout (no `model` inside)")
    kinds = getattr(config, "layer_types", None)  # without them, all layers are alike
    if "sliding_attention" in kinds if kinds else getattr(config, "sliding_window", None):
        reasons.append("sliding attention")
    if getattr(head, "bias", None) is not None:
        reasons.append("an output layer with a bias")
    if hasattr(head, "base_layer"):  # the matrix is read as it is, without what peft puts beside it
        reasons.append("an output layer with an adapter")
    if reasons:
        raise ValueError(f"models of the family {config.model_type!r} are not supported: {', '.join(reasons)}")


def unshareable(config: Any, size: int) -> str | None:
    """Why so many ranks cannot share the sequences of a model of this configuration (`ulysses.py`)."""
    if config.model_type not in SHARED_PREFIX_FAMILIES:  # as for a shared prefix, position and mask must say all
        return f"it is not known to be exact for the family {config.model_type!r}; set it to 1"
    text = config.get_text_config()
    return unshareable_heads(text.num_attention_heads, text.num_key_value_heads, size)


def prompt_positions(inputs: dict[str, Tensor]) -> Tensor:
    """The positions [3, L] of a prompt, for text models too."""
    positions = inputs["position_ids"]
    return positions if positions.dim() == 2 else positions.expand(3, -1)


def vision_tokens(prompt: Prompt) -> Tensor:
    """[L] bool: where the prompt's image features go."""
    return prompt.token_pool == VISION_POOL


class VisionIndices:
    """What a vision tower would otherwise work out image by image in Python, at every call.

    Called with the grids of a batch (patches in time, height and width of each image) it gives keyword arguments for
    the tower. Boundaries stay on the CPU, where `segment_attention` reads them without waiting for the device.
    """

    def __init__(self, tower: Any) -> None:
        self.tower = tower
        self._batches: dict[tuple[tuple[Grid, ...], torch.device], dict[str, Any]] = {}
        self._images: dict[Grid, dict[str, Tensor]] = {}

    def __call__(self, grids: tuple[Grid, ...], device: torch.device) -> dict[str, Any]:
        return remembered(self._batches, (grids, device), partial(self._of_batch, grids, device), CACHED_BATCHES)

    def _of_batch(self, grids: tuple[Grid, ...], device: torch.device) -> dict[str, Any]:
        pieces = [remembered(self._images, grid, partial(self._of_image, grid), CACHED_IMAGES) for grid in grids]
        indices: dict[str, Any] = {
            name: to_device(torch.cat([piece[name] for piece in pieces]), device)
            for name in ("position_ids", "interp_indices", "interp_weights")
            if name in pieces[0]
        }
        frames = torch.tensor([height * width for time, height, width in grids for _ in range(time)])
        indices |= _boundaries("cu_seqlens", "max_seqlen", frames)
        if "window_index" in pieces[0]:
            start, shifted = 0, []
            for piece in pieces:
                shifted.append(piece["window_index"] + start)
                start += len(piece["window_index"])
            indices["window_index"] = to_device(torch.cat(shifted), device)
            windows = torch.cat([piece["cu_window_seqlens"].diff() for piece in pieces])
            indices |= _boundaries("cu_window_seqlens", "max_window_seqlen", windows)
        return indices

    def _of_image(self, grid: Grid) -> dict[str, Tensor]:
        """The indices of one image, by the functions of transformers."""
        tower, grid_thw = self.tower, torch.tensor([grid])
        indices = {"position_ids": get_vision_position_ids(grid_thw, tower.spatial_merge_size)}
        if hasattr(tower, "window_size"):
            indices["window_index"], indices["cu_window_seqlens"] = get_vision_window_index(
                grid_thw, tower.spatial_merge_size, tower.window_size, tower.patch_size
            )
        if hasattr(tower, "num_grid_per_side"):
            indices["interp_indices"], indices["interp_weights"] = get_vision_interpolation_indices_and_weights(
                grid_thw,
                num_grid_per_side=tower.num_grid_per_side,
                mode=tower.interpolation_mode,
                align_corners=tower.interpolation_align_corners,
                spatial_merge_size=tower.spatial_merge_size,
            )
        return indices


def remembered(cache: dict[Key, Value], key: Key, make: Callable[[], Value], limit: int) -> Value:
    """The value of a key, made once; beyond the limit the one that was not used for longest is forgotten."""
    value = cache.pop(key) if key in cache else make()
    cache[key] = value
    if len(cache) > limit:
        del cache[next(iter(cache))]
    return value


def _boundaries(name: str, maximum: str, lengths: Tensor) -> dict[str, Any]:
    ends = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)])
    return {name: ends, maximum: int(lengths.max())}
