"""A model of any supported family: `encode_images` (images to features) and `forward_text` (tokens to hidden states).

Scoring sampled tokens (`forward.py`) and generating them (`rollout/local.py`) both use these. Images are encoded once
per prompt and view, however many rows contain them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import DynamicCache as Cache
from transformers import PreTrainedModel

from mtrl.models import patches
from mtrl.models.adapters import adapter_layers, adapter_parameters
from mtrl.models.cascade_attention import WIDEST_HEAD, CascadeMask
from mtrl.models.device_copy import put_rows, to_device
from mtrl.models.document_mask import CAUSAL_RULE, DocumentMask, MaskRule
from mtrl.models.families import find_family
from mtrl.models.families.model_family import Features
from mtrl.models.layer_kinds import RECURRENT, SLIDING, layer_kinds, make_mask_rules
from mtrl.models.masked_attention import (
    ATTENTION,
    CAUSAL,
    FLEX_COLUMNS,
    AttentionEditor,
    AttentionReader,
    use_attention,
)
from mtrl.models.model_size import head_widths
from mtrl.models.parallel.fsdp import compute_device
from mtrl.models.parallel.ranks import SINGLE_PROCESS, Ranks
from mtrl.models.parallel.sequence import SequenceParallelGroup, explain_indivisible_heads
from mtrl.models.recurrent import StateForks, StateMask, explain_layers, use_forked_states
from mtrl.models.routing import find_routers
from mtrl.types import VISION_POOL, Prompt

Mask = Tensor | BlockMask
Masks = Mask | Mapping[str, Mask] | None  # one for all layers with attention, or one for each kind of them
T = TypeVar("T")
SOFTCAP = "final_logit_softcapping"
LOGITS_CHANGED_BY = (SOFTCAP, "logit_scale", "logits_scaling", "lm_head_multiplier")
SCORE_CAP = "attn_logit_softcapping"  # of attention scores, which no attention here has; of Gemma 2 and VaultGemma


class Backbone:
    """`model` is a Hugging Face causal model of a family in `models/families`; the caller owns its weights.

    Products are computed in `compute_dtype`; weights, or only adapters, may be stored wider (float32 master weights).
    Add adapters before. `compiled` compiles norms, MLPs, rotary positions and recurrent layers, which pays for large
    models. A model may be sharded over `ranks` (`parallel/fsdp.py`), which then run every pass together.
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
        self.model, self.ranks, self.compiled = model, ranks, compiled
        self.compute_dtype = compute_dtype or model.dtype
        self.family = find_family(model.config)
        self.vision_tower: Any = self.family.find_vision_tower(model)
        self.language_model: Any = self.family.find_language_model(model)
        use_attention(self.language_model)
        self.layer_kinds = layer_kinds(self.language_model.config)
        self.attention_layers = [layer for layer, kind in enumerate(self.layer_kinds) if kind != RECURRENT]
        self.has_states = RECURRENT in self.layer_kinds
        text = self.language_model.config
        self.mask_rules = make_mask_rules(text, self.family.image_block_kinds(text))
        self.head_widths = head_widths(text)
        if self.has_states:
            use_forked_states(self.language_model, compiled)
        self.routers = find_routers(self.language_model)
        patches.use_wide_routers(self.routers)
        patches.use_no_dropout(model)
        patches.use_narrow_embedding_scale(model, self.compute_dtype)
        self.wide_adapters = any(
            each.dtype.itemsize > self.compute_dtype.itemsize for each in adapter_parameters(model).values()
        )
        if self.wide_adapters:
            patches.use_narrow_adapters(adapter_layers(model))
        self.images: Any = None  # an ImageEncoder
        if self.vision_tower is not None:
            narrow_cuda = self.device.type == "cuda" and self.compute_dtype.itemsize == 2
            self.family.prepare_tower(self.vision_tower, narrow_cuda=narrow_cuda)
            self.images = self.family.image_encoder(model, self.vision_tower)
        if compiled:
            patches.use_compiled_pieces(model)

    @property
    def device(self) -> torch.device:
        return compute_device(self.model)

    @property
    def sp_group(self) -> SequenceParallelGroup:
        return self.ranks.sp_group

    @property
    def output_matrix(self) -> Tensor:
        """The output matrix [V, H], for `algorithms.vocab`."""
        return self.model.get_output_embeddings().weight

    @property
    def softcap(self) -> float | None:
        """The bound of the logits, for `algorithms.vocab`."""
        return getattr(self.language_model.config, SOFTCAP, None)

    @property
    def vision_weights(self) -> dict[str, Tensor]:
        """All weights that the features of images may depend on: those outside of the language model and its output
        matrix. Empty for a text model."""
        if self.vision_tower is None:
            return {}
        text = [*self.language_model.parameters(), *self.model.get_output_embeddings().parameters()]
        vision = [self.vision_tower, self.family.find_projector(self.model)]
        others = {*text} - {weight for module in vision if module is not None for weight in module.parameters()}
        return {name: weight for name, weight in self.model.named_parameters() if weight not in others}

    def encode_images(self, inputs: Sequence[dict[str, Tensor]]) -> list[Features | None]:
        """Features of each prompt's images, from `PromptEncoder.inputs`; all images in one pass."""
        visual = [i for i, prompt in enumerate(inputs) if "pixel_values" in prompt]
        features: list[Features | None] = [None] * len(inputs)
        if not visual:
            if self.images is not None and self.ranks.any_rank(False):
                features[0] = self.encode_blank_image()
            return features
        self.ranks.any_rank(True)
        for i, encoded in zip(visual, self._run_tower([inputs[i] for i in visual]), strict=True):
            features[i] = encoded
        return features

    def encode_blank_image(self) -> Features:
        """Run the tower over one blank image and drop its tokens, while other ranks encode images: a sharded tower runs
        on all ranks or on none. The tower gets gradients of zeros."""
        assert self.images is not None
        (blank,) = self._run_tower([self.images.blank()])
        return blank.rows(slice(0))

    def _run_tower(self, inputs: Sequence[dict[str, Tensor]]) -> list[Features]:
        assert self.images is not None, "a text model was given an image"
        with self._precision():
            return self.images.encode(inputs, self.device)

    def forward_text(
        self,
        ids: Tensor,
        positions: Tensor,
        is_vision: Tensor | None = None,
        features: Sequence[Features | None] = (),
        attention_mask: Masks = None,
        cache: Cache | None = None,
        readers: Sequence[AttentionReader] = (),
        state_mask: StateMask = None,
        editor: AttentionEditor | None = None,
    ) -> Tensor:
        """Hidden states [B, S, H] of ids [B, S] at positions [3, B, S].

        `is_vision` [B, S], on the CPU, marks where the rows' features go, in their order. Without `attention_mask`
        ([B, 1, S, keys] bool, or blocks) attention is as the model defines it for right-padded rows. In a
        sequence-parallel group S is this rank's part of the positions, and the mask is that of whole sequences.
        `state_mask` is the mask of recurrent layers: responses that continue prompts, or [B, S] which positions are no
        padding.
        """
        embeds = self.model.get_input_embeddings()(ids).to(self.compute_dtype)
        extra: dict[str, Any] = {
            name: each.to(self.compute_dtype) for name, each in self.family.token_inputs(self.model, ids).items()
        }
        if readers:
            extra["readers"] = readers
        if editor is not None:
            extra["editor"] = editor
        if self.sp_group.size > 1:
            assert self.uses_own_attention, "sequence parallelism needs the attention of `models/masked_attention.py`"
            attention_mask = CAUSAL if attention_mask is None else attention_mask
            extra["sp_group"] = self.sp_group
        visual = [row for row in features if row is not None]
        if visual:
            assert is_vision is not None
            image = torch.cat([row.embeds for row in visual]).to(embeds.dtype)
            embeds = put_rows(embeds, is_vision, image)
            if attention_mask is None and self.has_image_blocks:  # the language model does not know its images
                attention_mask = self.make_masks(DocumentMask.from_rows(is_vision))
            if visual[0].deepstack:
                extra["visual_pos_masks"] = to_device(is_vision, self.device)
                extra["deepstack_visual_embeds"] = [
                    torch.cat(layers) for layers in zip(*(row.deepstack for row in visual), strict=True)
                ]
        with self._precision():
            output = self.language_model(
                inputs_embeds=embeds,
                position_ids=positions if self.family.position_axes == 3 else positions[0],
                attention_mask=self._convert_masks(attention_mask, state_mask, embeds.dtype),
                past_key_values=cache,
                use_cache=cache is not None,
                **extra,
            )
        return output.last_hidden_state.to(self.compute_dtype)

    def new_cache(self) -> Cache:
        """An empty cache of keys and values for `forward_text`."""
        return Cache(config=self.language_model.config)

    def select_rows(self, cache: Cache, rows: Tensor) -> None:
        """Keep these rows of a cache, which may repeat. (`batch_select_indices` does not know recurrent layers.)"""
        cache.reorder_cache(rows)  # type: ignore[arg-type]

    def _precision(self) -> torch.autocast:
        narrower = self.compute_dtype != self.model.dtype or self.wide_adapters
        return torch.autocast(self.device.type, dtype=self.compute_dtype, enabled=narrower)

    @property
    def attention_name(self) -> str:
        """The attention implementation that the user chose."""
        return "sdpa" if self.uses_own_attention else self.language_model.config._attn_implementation

    @property
    def uses_own_attention(self) -> bool:
        """Whether the language model uses `models/masked_attention.py`, which takes every mask and reads masses."""
        return self.language_model.config._attn_implementation == ATTENTION

    @property
    def can_pack(self) -> bool:
        """Whether all documents may share one sequence without padding: a kernel must take the model's heads, and the
        model must be able to share prefixes."""
        fits = min(self.head_widths) >= FLEX_COLUMNS and max(self.head_widths) <= WIDEST_HEAD  # wider: not tried
        has_kernel = self.uses_own_attention and self.device.type == "cuda" and fits
        return has_kernel and self.can_share_prefix

    @property
    def has_flash_kernels(self) -> bool:
        """Whether the flash kernels take the heads of this model."""
        fit = all(width % 8 == 0 and width <= WIDEST_HEAD for width in self.head_widths)
        return self.compute_dtype.itemsize == 2 and fit

    @property
    def can_share_prefix(self) -> bool:
        """Whether responses of a group may follow one copy of their prompt: the model must depend on the order of
        tokens only through positions and mask."""
        takes_masks = self.uses_own_attention or self.language_model.config._attn_implementation == "eager"
        return takes_masks and self.family.shares_prefix

    @property
    def is_causal(self) -> bool:
        """Whether every layer sees all earlier tokens and no later ones."""
        return all(rule == CAUSAL_RULE for rule in self.mask_rules.values())

    @property
    def has_image_blocks(self) -> bool:
        return any(rule.image_blocks for rule in self.mask_rules.values())

    @property
    def mask_settings(self) -> tuple[Any, ...]:
        """What masks and state forks depend on besides the documents and the device."""
        return *self.mask_rules.items(), self.has_flash_kernels, self.has_states

    def make_masks(self, documents: DocumentMask, packed: bool = False) -> dict[str, Mask]:
        """The mask of each kind of layers that have attention."""
        rules = {kind: rule.within(documents) for kind, rule in self.mask_rules.items()}
        masks = {rule: self.make_mask(documents, packed, rule) for rule in dict.fromkeys(rules.values())}
        return {kind: masks[rule] for kind, rule in rules.items()}

    def make_mask(self, documents: DocumentMask, packed: bool, rule: MaskRule) -> Mask:
        """The mask for the kernels of this device: spans or blocks for one packed sequence, otherwise a matrix for
        each."""
        if packed and self.device.type == "cuda":
            if rule == CAUSAL_RULE and self.has_flash_kernels:
                return CascadeMask.from_documents(documents, self.device)
            return documents.blocks(self.device, rule)
        return documents.dense(rule).to(self.device)

    def make_step_masks(self, is_real: Tensor) -> dict[str, Mask]:
        """The masks for one more token of each row, from which tokens so far [B, S] are no padding. The cache of layers
        with a window holds those in the window alone."""
        kept = {kind: slice(rule.window and -rule.window, None) for kind, rule in self.mask_rules.items()}
        return {kind: is_real[:, None, None, columns] for kind, columns in kept.items()}

    def by_layer(self, values: Mapping[str, T]) -> list[T | None]:
        """The value of each layer, from one for each kind of layers; None where there is none."""
        return [values.get(kind) for kind in self.layer_kinds]

    def make_state_forks(self, documents: DocumentMask) -> StateForks | None:
        """The mask of recurrent layers for sequences of prompts and responses; None if the model has no such layers."""
        return StateForks.from_mask(documents, self.device) if self.has_states else None

    def _convert_masks(self, attention: Masks, states: StateMask, dtype: torch.dtype) -> Any:
        """The masks as the language model takes them: by kind if it has several kinds of layers."""
        if attention is None and states is None:
            return None
        masks = attention if isinstance(attention, Mapping) else dict.fromkeys(self.mask_rules, attention)
        converted: dict[str, Any] = {
            kind: None if mask is None else self._convert_mask(mask, dtype) for kind, mask in masks.items()
        }
        if self.has_states:
            converted[RECURRENT] = states
        return converted if len(converted) > 1 else next(iter(converted.values()))

    def _convert_mask(self, mask: Tensor | BlockMask, dtype: torch.dtype) -> Tensor | BlockMask:
        """The mask for the attention implementation: `eager` would add a bool mask to the scores."""
        if self.uses_own_attention or isinstance(mask, BlockMask):
            return mask
        implementation = self.language_model.config._attn_implementation
        if implementation == "eager":
            return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        raise ValueError(f"attn_implementation {implementation!r} does not take this mask; set sdpa or eager")


def check_supported(model: PreTrainedModel) -> None:
    """Raise a ValueError for models that `forward_text` and `output_matrix` would silently compute wrongly."""
    config: Any = model.config.get_text_config()
    head: Any = model.get_output_embeddings()
    family = find_family(model.config)
    changed = [name for name in LOGITS_CHANGED_BY if getattr(config, name, None) not in (None, 1.0)]
    reasons = [name for name in changed if name != SOFTCAP or not family.caps_logits]
    reasons += family.explain_unsupported(config)
    if getattr(config, SCORE_CAP, None):
        reasons.append("a cap of attention scores")
    if not hasattr(model, "model"):
        reasons.append("its layout (no `model` inside)")
    else:
        reasons += explain_layers(family.find_language_model(model), family.sliding_windows)
    if config is model.config and getattr(config, "use_bidirectional_attention", None) is True:
        reasons.append("attention of text to later tokens")
    if getattr(head, "bias", None) is not None:
        reasons.append("an output layer with a bias")
    if hasattr(head, "base_layer"):  # `output_matrix` is the weight without its adapter
        reasons.append("an output layer with an adapter")
    if reasons:
        raise ValueError(f"models of the family {config.model_type!r} are not supported: {', '.join(reasons)}")


def explain_no_sequence_parallel(config: Any, sp_size: int) -> str | None:
    """Why this many ranks cannot split the sequences of a model of this configuration; None if they can."""
    if not find_family(config).splits_sequences:
        return f"it is not known to be exact for the family {config.model_type!r}; set it to 1"
    text = config.get_text_config()
    if SLIDING in layer_kinds(text) or find_family(config).image_block_kinds(text):
        return "it splits no attention with sliding windows or image blocks; set it to 1"
    return explain_indivisible_heads(text.num_attention_heads, text.num_key_value_heads, sp_size)


def prompt_positions(inputs: dict[str, Tensor]) -> Tensor:
    """The positions [3, L] of a prompt, for text models too."""
    positions = inputs["position_ids"]
    return positions if positions.dim() == 2 else positions.expand(3, -1)


def vision_tokens(prompt: Prompt) -> Tensor:
    """[L] bool: where the prompt's image features go."""
    return prompt.token_pool == VISION_POOL
