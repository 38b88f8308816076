"""A model that has a shape and no numbers, to count what its passes would hold.

It is made of torch's fake tensors: every operation runs and none computes, so that a pass of a large model at its real
width takes neither its memory nor its time. config.json is all it needs. `cut` leaves a few of its layers: what a pass
holds grows by the same amount with each, so that few layers say it of many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from mtrl.models.activation_checkpointing import Recomputed, recompute
from mtrl.models.adapters import ADAPTER, AdapterSettings, adapter_layers, inject
from mtrl.models.backbone import Backbone, Features, check_supported
from mtrl.models.families import VISION_FAMILIES, TextEncoder, in_a_line
from mtrl.models.families.vision import rotary_positions
from mtrl.models.masked_attention import DocumentMask
from mtrl.models.patches import use_padded_mlps
from mtrl.protocols import ImageSettings
from mtrl.types import TEXT_POOL, VISION_POOL, Prompt, Task
from mtrl.utils.live_tensors import LiveTensors


class FakeModel:
    """`attention` and `checkpointing` as the configuration has them; `compiled`: MLPs are compiled on the target;
    `padded`: those of the vision tower are padded there (`use_padded_mlps`)."""

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        dtype: torch.dtype = torch.float32,
        attention: str = "sdpa",
        checkpointing: Recomputed = False,
        train_vision: bool = True,
        compiled: bool = False,
        padded: bool = False,
        trust_remote_code: bool = False,
        adapters: AdapterSettings | None = None,
    ) -> None:
        family: Any = AutoModelForImageTextToText if config.model_type in VISION_FAMILIES else AutoModelForCausalLM
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            with self.mode:
                self.model: Any = family.from_config(
                    config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
                ).eval()
        except Exception as error:  # numbers in a config.json that do not go together end in any error
            raise ValueError(f"no model can be built from its config.json: {in_a_line(error)}") from error
        check_supported(self.model)
        self.tower: Any = getattr(self.model.model, "visual", None)
        if self.tower is not None:
            self.tower.requires_grad_(train_vision)
        if adapters is not None:
            self._add_adapters(adapters)
        self.language_model: Any = getattr(self.model.model, "language_model", self.model.model)
        self.layers = self.language_model.layers
        self.blocks: Any = [] if self.tower is None else self.tower.blocks
        self.encoder = FakeEncoder(self)
        if self.tower is not None:
            if self._deepstack:  # of layers that are there after a cut
                self.tower.deepstack_visual_indexes = list(range(self._deepstack))
            if padded:
                use_padded_mlps(self.tower)
        recompute(self.model, checkpointing)
        if compiled:
            for module in self.model.modules():
                if type(module).__name__.lower().endswith("mlp"):
                    module.forward = without_cached_casts(module.forward)

    def _add_adapters(self, settings: AdapterSettings) -> None:
        """They come without numbers, and peft would move fake ones, which cannot be moved."""
        inject(self.model, settings, empty=True)
        with self.mode:
            for layer in adapter_layers(self.model):
                for linear in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
                    weight = torch.empty(linear.weight.shape, dtype=linear.weight.dtype)
                    linear.weight = torch.nn.Parameter(weight)

    @property
    def depth(self) -> tuple[int, int]:
        """Layers of the language model and of the vision tower."""
        return len(self.layers), len(self.blocks)

    @property
    def few(self) -> int:
        """Layers that a cut leaves at least: those that take features of their own differ from the others."""
        return max(2, self._deepstack)

    @property
    def _deepstack(self) -> int:
        return len(getattr(self.tower, "deepstack_visual_indexes", ()))

    def cut(self, layers: int, blocks: int) -> None:
        self.language_model.layers = self.layers[:layers]
        if self.tower is not None:
            self.tower.blocks = self.blocks[:blocks]

    def fill_gradients(self) -> None:
        """As a pass finds them after another one."""
        with self.mode:
            for parameter in self.model.parameters():
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None


def without_cached_casts(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As compiled code does it: autocast keeps narrow copies of weights until its end, compiled code lets them go."""

    @wraps(forward)
    def run(*args: Any, **options: Any) -> Tensor:
        torch.set_autocast_cache_enabled(False)
        try:
            return forward(*args, **options)
        finally:
            torch.set_autocast_cache_enabled(True)

    return run


class FakeBackbone(Backbone):
    """Tells when it sees, reads, scores and ends, so that each moment is counted by itself: what they hold grows with
    the layers at different rates.

    What a packed sequence sees is told to a kernel that skips the rest. The causal kernel stands in for it and keeps
    the same: queries, keys, values, its output and a number for each row.
    """

    def __init__(self, fake: FakeModel, compute_dtype: torch.dtype, live: LiveTensors) -> None:
        super().__init__(fake.model, compute_dtype)
        self.fake, self.live = fake, live

    def encode_images(self, inputs: Sequence[dict[str, Tensor]]) -> list[Features | None]:
        self.live.begin("see")
        return super().encode_images(inputs)

    def forward_text(self, ids: Tensor, positions: Tensor, *args: Any, **options: Any) -> Tensor:
        self.live.begin("read")
        if options.get("attention_mask") is None:
            positions = torch.arange(ids.shape[1]).expand(3, *ids.shape)  # one sequence, or transformers makes a mask
        hook = self.language_model.layers[0].register_forward_hook(self._tell_end)
        try:
            return super().forward_text(ids, positions, *args, **options)
        finally:
            hook.remove()
            self.live.begin("score")

    def _tell_end(self, _module: Any, _inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.live.begin("end"))

    def sight_mask(self, sight: DocumentMask, packed: bool) -> Any:
        if packed:
            return None
        sequences, size = sight.segment.shape
        with self.fake.mode:
            return torch.ones(sequences, 1, size, size, dtype=torch.bool)


class FakeEncoder(TextEncoder):
    """Prompts of the right shape, without a tokenizer."""

    def __init__(self, fake: FakeModel) -> None:
        self.mode, self.stop_ids, self.pad_id = fake.mode, (), 0
        vision = None if fake.tower is None else fake.tower.config
        self.image_settings = None if vision is None else fake_settings(vision)
        self.patch_numbers = 0 if vision is None else fake.tower.patch_embed.proj.weight[0].numel()

    def encode(self, task: Task, media: Sequence[np.ndarray]) -> Prompt:
        side = self.image_settings.factor if self.image_settings else 1
        places = sum(m.shape[0] // side * (m.shape[1] // side) for m in media)
        pool = torch.tensor([*places * [VISION_POOL], TEXT_POOL])
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


def fake_settings(vision: Any) -> ImageSettings:
    """The shapes of a vision tower's patches; of the pixels' values nothing is known."""
    return ImageSettings(vision.patch_size, vision.spatial_merge_size, 2, 1, 1, 1.0, (0.0,) * 3, (1.0,) * 3)
