"""A model with shapes and no numbers, to count the memory of its passes.

It consists of torch's fake tensors: every operation runs and none computes, so a pass of a large model at its real
width takes neither its memory nor its time. It needs config.json, and where an image is squares of a fixed size also
the checkpoint's image settings and tokenizer. `cut` keeps a few of its layers: activations grow by the same amount with
each layer, so the memory of all layers can be extrapolated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mtrl.memory.live_tensors import LiveTensors
from mtrl.memory.plan import Plan
from mtrl.models.activation_checkpointing import enable_activation_checkpointing
from mtrl.models.adapters import ADAPTER, AdapterSettings, adapter_layers, inject_adapters
from mtrl.models.backbone import Backbone, check_supported
from mtrl.models.document_mask import DocumentMask, MaskRule
from mtrl.models.families import QwenVLFamily, TextEncoder, UndescribedFamily, describe_error, find_family
from mtrl.models.families.model_family import Features, ModelFamily
from mtrl.models.families.qwen_tower import QwenImageEncoder
from mtrl.models.families.vision import rotary_positions
from mtrl.models.load_model import DTYPES, build_uninitialized
from mtrl.models.patches import use_padded_mlps
from mtrl.protocols import ImageSettings
from mtrl.types import TEXT_POOL, VISION_POOL, Prompt, Task


class NotEstimated(ValueError):
    """The memory of a model of this family is not known in advance."""


class FakeModel:
    """The model of a config.json as the plan trains it."""

    def __init__(self, config: Any, plan: Plan) -> None:
        dtype = DTYPES[plan.frozen_dtype if plan.split is None else plan.compute]  # weights in a pass
        attention = "eager" if plan.attention == "eager" else "sdpa"  # other kernels hold as much as sdpa
        options = {"attn_implementation": attention, "trust_remote_code": plan.trust_remote_code}
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            with self.mode:
                self.model: Any = build_uninitialized(config, dtype=dtype, **options)
        except Exception as error:  # contradictory numbers in a config.json end in any error
            raise ValueError(f"no model can be built from its config.json: {describe_error(error)}") from error
        check_supported(self.model)
        family = find_family(config)
        if isinstance(family, UndescribedFamily):
            raise NotEstimated(
                f"the memory of models of the family {config.model_type!r}, which is not described, is not estimated; "
                "a run measures it on the GPU before its first step"
            )
        self.tower: Any = family.find_vision_tower(self.model)
        if self.tower is not None:
            self.tower.requires_grad_(plan.train_vision)
        if plan.adapters is not None:
            self._add_adapters(plan.adapters)
        self.language_model: Any = family.find_language_model(self.model)
        self.layers = self.language_model.layers
        self.blocks: Any = family.find_vision_layers(self.model)
        self.encoder = make_fake_encoder(self, family, plan)
        if self.tower is not None:
            self._holder, self._name = find_place(self.blocks, self.tower)
            if self._deepstack:  # layers that remain after a cut
                self.tower.deepstack_visual_indexes = list(range(self._deepstack))
            if plan.on_gpu and plan.compute_bytes == 2 and isinstance(family, QwenVLFamily):  # as in Backbone
                use_padded_mlps(self.tower)
        enable_activation_checkpointing(self.model, plan.checkpointing)
        if plan.compiled:
            for module in self.model.modules():
                if type(module).__name__.lower().endswith("mlp"):
                    module.forward = disable_cast_cache(module.forward)

    def _add_adapters(self, settings: AdapterSettings) -> None:
        """peft would move fake tensors, which cannot be moved: inject meta tensors and replace them by fake ones."""
        inject_adapters(self.model, settings, empty=True)
        with self.mode:
            for layer in adapter_layers(self.model):
                for linear in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
                    weight = torch.empty(linear.weight.shape, dtype=linear.weight.dtype)
                    linear.weight = nn.Parameter(weight)

    @property
    def depth(self) -> tuple[int, int]:
        """Layers of the language model and of the vision tower."""
        return len(self.layers), len(self.blocks)

    @property
    def fewest_layers(self) -> int:
        """The fewest layers to cut to: layers that take deepstack features differ from the others."""
        return max(2, self._deepstack, self.layer_period)

    @property
    def layer_period(self) -> int:
        """After so many layers their kinds repeat."""
        kinds = getattr(self.language_model.config, "layer_types", None) or [""]
        periods = (n for n in range(1, len(kinds) + 1) if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
        return next(periods)

    @property
    def _deepstack(self) -> int:
        return len(getattr(self.tower, "deepstack_visual_indexes", ()))

    def cut(self, layers: int, blocks: int) -> None:
        self.language_model.layers = self.layers[:layers]
        if self.tower is not None:
            setattr(self._holder, self._name, self.blocks[:blocks])

    def fill_gradients(self) -> None:
        """Give every trainable parameter a gradient, as after an earlier pass."""
        with self.mode:
            for parameter in self.model.parameters():
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None


def find_place(part: Any, whole: nn.Module) -> tuple[nn.Module, str]:
    """The module that holds a part, and under which name."""
    return next(
        (module, name) for module in whole.modules() for name, child in module.named_children() if child is part
    )


def disable_cast_cache(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Imitate compiled code, which frees narrow copies of weights at once; autocast keeps them until its end."""

    @wraps(forward)
    def run(*args: Any, **options: Any) -> Tensor:
        torch.set_autocast_cache_enabled(False)
        try:
            return forward(*args, **options)
        finally:
            torch.set_autocast_cache_enabled(True)

    return run


class FakeBackbone(Backbone):
    """Marks the moments of a pass (vision tower, language model, log-probs, end of backward) for `live`: their peaks
    grow with the layers at different rates.

    A packed sequence has a block mask. The causal kernel stands in for flex_attention and keeps the same tensors:
    queries, keys, values, its output and a number for each row.
    """

    def __init__(self, fake: FakeModel, compute_dtype: torch.dtype, live: LiveTensors) -> None:
        super().__init__(fake.model, compute_dtype)
        self.fake, self.live = fake, live

    def encode_images(self, inputs: Sequence[dict[str, Tensor]]) -> list[Features | None]:
        self.live.begin("vision")
        return super().encode_images(inputs)

    def forward_text(self, ids: Tensor, positions: Tensor, *args: Any, **options: Any) -> Tensor:
        self.live.begin("text")
        masks = options.get("attention_mask")
        if masks is None or None in masks.values():
            positions = torch.arange(ids.shape[1]).expand(3, *ids.shape)  # otherwise transformers makes a mask
        hook = self.language_model.layers[0].register_forward_hook(self._mark_end)
        try:
            return super().forward_text(ids, positions, *args, **options)
        finally:
            hook.remove()
            self.live.begin("score")

    def _mark_end(self, _module: Any, _inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.live.begin("end"))

    def make_mask(self, documents: DocumentMask, packed: bool, rule: MaskRule) -> Any:
        if packed:
            return None
        sequences, size = documents.segment.shape
        with self.fake.mode:
            return torch.ones(sequences, 1, size, size, dtype=torch.bool)


def make_fake_encoder(fake: FakeModel, family: ModelFamily, plan: Plan) -> TextEncoder:
    """For text models, and for towers that read grids of patches, by config.json alone."""
    if fake.tower is None or issubclass(family.image_encoder, QwenImageEncoder):
        return FakeEncoder(fake)
    if plan.make_encoder is None:
        raise NotEstimated("its images are not known without the checkpoint's tokenizer and image settings")
    return LoadedEncoder(plan.make_encoder(plan.limits.max_pixels), fake.mode)


class FakeEncoder(TextEncoder):
    """Makes prompts of the right shape, without a tokenizer."""

    def __init__(self, fake: FakeModel) -> None:
        self.mode, self.stop_ids, self.pad_id = fake.mode, (), 0
        vision = None if fake.tower is None else fake.tower.config
        if vision is not None:  # shapes of patches; pixel values do not matter
            patch, merge = vision.patch_size, vision.spatial_merge_size
            self.image_settings = ImageSettings(patch, merge, 2, 1, 1, 1.0, (0.0,) * 3, (1.0,) * 3)
        self.patch_numbers = 0 if vision is None else fake.tower.patch_embed.proj.weight[0].numel()

    def encode(self, task: Task, media: Sequence[np.ndarray]) -> Prompt:
        side = self.image_settings.factor if self.image_settings else 1
        image_tokens = sum(m.shape[0] // side * (m.shape[1] // side) for m in media)
        pool = torch.tensor([*image_tokens * [VISION_POOL], TEXT_POOL])
        ids = torch.zeros_like(pool)
        return Prompt(task, tuple(media), ids, ids, pool)

    def inputs(
        self, prompt: Prompt, media: Sequence[np.ndarray] | None = None, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        images = self.image_settings
        patch, merge = (images.patch_size, images.merge_size) if images else (1, 1)
        grids = [(1, m.shape[0] // patch, m.shape[1] // patch) for m in prompt.media]
        sides = [(rows // merge, columns // merge) for _, rows, columns in grids]
        inputs = {"position_ids": rotary_positions(prompt.token_pool == VISION_POOL, sides)}
        if grids:
            with self.mode:
                patches = sum(rows * columns for _, rows, columns in grids)
                inputs["pixel_values"] = torch.ones(patches, self.patch_numbers)
            inputs["image_grid_thw"] = torch.tensor(grids)
        return inputs

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        return ""


class LoadedEncoder(TextEncoder):
    """Makes prompts by the encoder of a checkpoint, with pixel values of the same shapes."""

    def __init__(self, encoder: TextEncoder, mode: FakeTensorMode) -> None:
        self.encoder, self.mode, self.stop_ids, self.pad_id = encoder, mode, (), 0
        self.image_settings = encoder.image_settings
        self._last: tuple[Prompt | None, dict[str, Tensor]] = (None, {})

    def largest_image(self, tokens: int) -> tuple[int, int]:
        return self.encoder.largest_image(tokens)

    def encode(self, task: Task, media: Sequence[np.ndarray]) -> Prompt:
        return self.encoder.encode(task, media)

    def inputs(
        self, prompt: Prompt, media: Sequence[np.ndarray] | None = None, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        if self._last[0] is not prompt:  # all prompts of a pass are one
            self._last = prompt, self.encoder.inputs(prompt)
        with self.mode:
            return {
                name: torch.ones(each.shape) if each.is_floating_point() else each
                for name, each in self._last[1].items()
            }

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        return ""
