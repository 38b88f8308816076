"""The model side of a family: what the package must know of a model beyond transformers' own classes.

The other side is the prompt encoder (`text.py`, `qwen_vl.py`), which makes tokens and pixels. `families/__init__.py`
lists the families; docs/extending.md shows how to add one from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mtrl.models.families.text import TextEncoder
from mtrl.models.layer_kinds import layer_kinds


@dataclass(frozen=True, eq=False)
class Features:
    """Features of one prompt's images: [image tokens, H], and the same for each deepstack layer."""

    embeds: Tensor
    deepstack: tuple[Tensor, ...] = ()

    def rows(self, index: Tensor | slice) -> Features:
        """The features of some image tokens."""
        return self.map(lambda layer: layer[index])

    def map(self, function: Callable[[Tensor], Tensor]) -> Features:
        return Features(function(self.embeds), tuple(map(function, self.deepstack)))


class ImageEncoder:
    """Computes the features of images by `get_image_features` of transformers.

    Right for families whose `inputs` hold one entry of `pixel_values` (and of every other name in `arguments`) for each
    image. Others override `encode`, such as Qwen's, which also keeps indices and boundaries that transformers would
    compute again at every call.
    """

    arguments: tuple[str, ...] = ("pixel_values",)
    narrows_pixels: bool = True  # False: the tower does it itself, after computing with them

    def __init__(self, model: Any, tower: Any) -> None:
        self.model, self.tower = model, tower

    def encode(self, inputs: Sequence[dict[str, Tensor]], device: torch.device) -> list[Features]:
        """The features of each prompt's images, from `PromptEncoder.inputs`, all in one pass of the tower."""
        joined = {name: torch.cat([each[name] for each in inputs]).to(device) for name in self.arguments}
        if self.narrows_pixels:
            joined["pixel_values"] = joined["pixel_values"].to(self.tower.dtype)
        images = self.model.model.get_image_features(**joined, return_dict=True).pooler_output
        prompts = iter([each.flatten(0, -2) for each in images])
        return [Features(torch.cat([next(prompts) for _ in each["pixel_values"]])) for each in inputs]

    def blank(self) -> dict[str, Tensor]:
        """The inputs of a blank image, as small as the model takes it."""
        side = tower_side(self.model.config)
        return {"pixel_values": torch.zeros(1, 3, side, side)}


class ModelFamily:
    """What the models of a family consist of. The defaults are those of a text model.

    Names are paths of attributes: `vision_tower` and `projector` from the model, `vision_layers` from the tower. A
    projector that is a part of the tower, as Qwen's, is not named.

    `shares_prefix`: the responses of a group may follow one copy of their prompt, since a token depends on earlier ones
    only through positions, the attention mask and states that can be forked. `splits_sequences`: sequence parallelism
    is exact. Both are claims that tests/conformance checks.

    `sliding_windows` and `image_blocks` say what attention sees besides all earlier tokens: layers that the config
    calls `sliding_attention` see the last `sliding_window` ones; tokens of an image see one another in all layers, or
    in those of `image_block_kinds`. `caps_logits`: they are bounded by the config's `final_logit_softcapping`.
    """

    encoder: ClassVar[type[TextEncoder]] = TextEncoder
    image_encoder: ClassVar[type[ImageEncoder]] = ImageEncoder
    vision_tower: ClassVar[str | None] = None
    vision_layers: ClassVar[str | None] = None  # None: the longest list of modules in the tower
    projector: ClassVar[str | None] = None
    unused_parts: ClassVar[tuple[str, ...]] = ()  # paths of modules that no pass runs, such as a tower for sounds
    position_axes: ClassVar[int] = 1  # 3: rotary positions in time, height and width
    caps_logits: ClassVar[bool] = False
    sliding_windows: bool = False
    image_blocks: bool = False
    shares_prefix: bool = False
    splits_sequences: bool = False
    runs_in_vllm: ClassVar[bool] = True  # False: tried, and it does not compute what the trainer does
    vllm_names: ClassVar[Mapping[str, str]] = MappingProxyType({})  # how weights' names begin: here, and in vLLM

    def find_language_model(self, model: Any) -> Any:
        return getattr(model.model, "language_model", model.model)

    def find_vision_tower(self, model: Any) -> Any:
        """None for a text model."""
        return None if self.vision_tower is None else attrgetter(self.vision_tower)(model)

    def find_projector(self, model: Any) -> Any:
        """None if it is a part of the tower, or not known."""
        return None if self.projector is None else attrgetter(self.projector)(model)

    def find_vision_layers(self, model: Any) -> Sequence[nn.Module]:
        tower = self.find_vision_tower(model)
        if tower is None:
            return []
        if self.vision_layers is not None:
            return attrgetter(self.vision_layers)(tower)
        lists: list[Any] = [each for each in tower.modules() if isinstance(each, nn.ModuleList)]
        return max(lists, key=len)

    def freeze_unused_parts(self, model: Any) -> None:
        """They keep their weights in checkpoints; an optimizer holds nothing for them."""
        for module in (attrgetter(path)(model) for path in self.unused_parts):
            if module is not None:
                module.requires_grad_(False)

    def image_block_kinds(self, config: Any) -> Collection[str]:
        """The kinds of layers where tokens of an image see one another, from a language model's config."""
        return layer_kinds(config) if self.image_blocks else ()

    def explain_no_vllm(self, config: Any) -> str | None:
        """Why vLLM would compute something else than the trainer for a model of this config; None if it does not."""
        return None if self.runs_in_vllm else "docs/vllm.md says what was measured"

    def explain_unsupported(self, config: Any) -> list[str]:
        """What else a language model of this config has that would be computed wrongly."""
        return []

    def token_inputs(self, model: Any, ids: Tensor) -> dict[str, Tensor]:
        """What the language model takes of the tokens [B, S] besides their embeddings."""
        return {}

    def shard_units(self, model: Any) -> Iterator[nn.Module]:
        """The modules that FSDP gathers as one, in the order of a pass."""
        yield from self.find_vision_layers(model)
        yield from self.find_language_model(model).layers

    def list_projections(self, model: Any) -> tuple[list[str], list[str]]:
        """Names of the linear projections of the language model's layers, and of the vision tower with its projector:
        those that adapters may be added to."""
        names = {module: name for name, module in model.named_modules()}
        language = (f"{names[self.find_language_model(model)]}.layers.",)
        towers = (self.find_vision_tower(model), self.find_projector(model))
        vision = tuple(f"{names[module]}." for module in towers if module is not None)
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        in_language, in_vision = ([name for name in linear if name.startswith(part)] for part in (language, vision))
        return in_language, in_vision

    def prepare_tower(self, tower: Any, *, narrow_cuda: bool) -> None:
        """Replace slow parts of the tower by faster ones with the same results. `narrow_cuda`: products in 16 bits on
        a CUDA device."""


class TextFamily(ModelFamily):
    def __init__(self, model_type: str) -> None:
        tested = model_type in SHARED_PREFIX_TEXT_FAMILIES
        self.shares_prefix = self.sliding_windows = tested
        self.splits_sequences = tested and model_type != "gemma3_text"  # most of its layers have windows


SHARED_PREFIX_TEXT_FAMILIES = ("qwen2", "qwen3", "llama", "mistral", "gemma3_text")  # tested


def tower_side(config: Any) -> int:
    """Pixels of a side of the squares that the vision tower takes."""
    side = config.vision_config.image_size
    return side if isinstance(side, int) else side[0]
