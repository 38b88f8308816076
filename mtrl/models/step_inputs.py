"""What several passes of one training step read: made by the first of them, kept until the step ends.

Probe, reference, update and critic read the same prompts, and where they cut the rows alike also the same sequences.
Image features are kept if nothing that makes them learns. Each kind of value has its place:

where    what                                   bytes                                              at most
cpu      positions of a prompt                  24 per token                                       CPU_BYTES
         layout of a pass with one view         84 per position
         features, on a GPU in pinned memory    width of the features * bytes, per image token;
                                                with deepstack (Qwen3-VL) for each of its layers too
device   pixels of a prompt, if not features    19 kB per image token of 28 x 28 pixels            DEVICE_BYTES
         ids, positions and masks of a pass     32 per position, and the mask

256 prompts of 1,000 image tokens: 1.0 GB of features for a 3B model (2,048 numbers in bf16), 8.4 GB for a Qwen3-VL of
4,096 numbers and three deepstack layers. Their pixels would take 4.8 GB and are 0.6 GB before they are normalized, so
large images are made again from their bytes. What finds no room is made again by every pass. The prompts
with these bytes are held too, which on a rank would otherwise live for one call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from mtrl.models.backbone import Backbone
from mtrl.models.parallel.fsdp import local_tensor
from mtrl.types import Prompt

Value = TypeVar("Value")
CPU_BYTES = 4 << 30  # torch gives pinned memory in powers of two, which takes up to twice as much
DEVICE_BYTES = 64 << 20  # on top of what a run's memory estimate counts


class StepInputs:
    """The values of one step by their keys. Before `begin` and after `end` nothing is kept, and nothing is found."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.end()

    def begin(self, learner: Backbone, step: int | None = None) -> None:
        """Keep values from now on, for passes of `learner` among others. Another step ends; None: this one goes on."""
        if step is not None and step != self.step:
            self.end()
            self.step = step
        self.is_open = True
        if learner not in self._towers:
            same = self._find_same_tower(learner)
            self._towers[learner] = learner if same is None and makes_fixed_features(learner) else same

    def end(self) -> None:
        self.step, self.is_open = None, False
        self._values: dict[Hashable, Any] = {}
        self._room = {"cpu": CPU_BYTES, "device": DEVICE_BYTES}
        self._prompts: dict[str, Prompt] = {}  # the first one of each task
        self._towers: dict[Backbone, Backbone | None] = {}

    def find(self, *key: Hashable) -> Any:
        """The value; None if it is not kept."""
        return self._values.get(key)

    def keep(
        self,
        *key: Hashable,
        value: Value,
        where: Literal["cpu", "device"] = "cpu",
        copy: Callable[[Value], Value] = lambda value: value,
    ) -> None:
        """Keep a value, or its `copy`, if there is room."""
        if self.is_open and key not in self._values and (size := count_bytes(value)) <= self._room[where]:
            self._room[where] -= size
            self._values[key] = copy(value)

    def first_equal(self, prompt: Prompt) -> Prompt:
        """The same object for equal prompts, for keys: ranks get new objects with every call."""
        if not self.is_open:
            return prompt
        first = self._prompts.setdefault(prompt.task.id, prompt)
        return first if first is prompt or is_equal(first, prompt) else prompt

    # --------------------------------------------------------------------------------------------------------- features
    def tower_of(self, backbone: Backbone) -> Backbone | None:
        """Under whose name the features of images are kept: the first learner of this step with the same frozen vision
        weights. None: they are not kept. The ranks of a model call this together."""
        if self.is_open and backbone not in self._towers:
            self._towers[backbone] = self._find_same_tower(backbone)
        return self._towers.get(backbone)

    def _find_same_tower(self, backbone: Backbone) -> Backbone | None:
        towers = [each for each in dict.fromkeys(self._towers.values()) if each is not None]
        if not makes_fixed_features(backbone):
            return None
        return next((each for each in towers if not backbone.ranks.any_rank(not encode_alike(each, backbone))), None)


def makes_fixed_features(backbone: Backbone) -> bool:
    """Whether nothing that the features of an image depend on learns. The ranks of a sequence-parallel group encode
    parts of an image, which differ between passes."""
    weights = backbone.vision_weights
    return bool(weights) and backbone.sp_group.size == 1 and not any(each.requires_grad for each in weights.values())


def encode_alike(ours: Backbone, theirs: Backbone) -> bool:
    """Whether both make bitwise the same features: their settings and weights are equal."""
    configs = [getattr(each.model.config, "vision_config", each.model.config) for each in (ours, theirs)]
    settings = [
        (each.compute_dtype, each.compiled, config.to_dict())
        for each, config in zip((ours, theirs), configs, strict=True)
    ]
    first, second = ours.vision_weights, theirs.vision_weights
    return (
        settings[0] == settings[1]
        and first.keys() == second.keys()
        and all(is_bitwise_equal(weight, second[name]) for name, weight in first.items())
    )


def is_bitwise_equal(first: Tensor, second: Tensor) -> bool:
    ours, theirs = local_tensor(first), local_tensor(second)
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs.to(ours.device))


def is_equal(first: Prompt, second: Prompt) -> bool:
    """Whether a model reads the same tokens and pixels."""
    return (
        torch.equal(first.ids, second.ids)
        and torch.equal(first.token_pool, second.token_pool)
        and len(first.media) == len(second.media)
        and all(map(np.array_equal, first.media, second.media))
    )


def count_bytes(value: Any) -> int:
    """The memory of all tensors in a value."""
    if isinstance(value, Mapping):
        return sum(map(count_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(count_bytes, value))
    own = value.nbytes if isinstance(value, Tensor) else 0
    return own + count_bytes(getattr(value, "__dict__", {}))
