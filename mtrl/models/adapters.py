"""LoRA: small matrices that learn beside frozen weights, by the peft library.

They are injected: the model stays the Hugging Face model that it was, with other layers in the places of some
projections, and everything that works on it goes on to work. Without its adapters a model is the base that they were
given, so a reference takes no second copy. On a disk they are files of peft, which name their base.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mtrl.models.checkpoint_files import read_json_object
from mtrl.models.parallel.fsdp import is_split, whole
from mtrl.models.quantized import four_bit_layers, quantize

ADAPTER = "default"  # peft's name for the one that a model has here
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every name in peft's files: the model stands inside two of its own
BASE = "base_model_name_or_path"


@dataclass(frozen=True)
class AdapterSettings:
    """`targets` are the ends of names, None: every projection of the layers. `dtype` is what they are kept in."""

    rank: int = 8
    alpha: int = 16
    targets: tuple[str, ...] | None = None
    vision_tower: bool = False
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32
    seed: int = 0


def library() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ValueError("adapters need the library peft: pip install 'mtrl[lora]'") from error
    return peft


# ------------------------------------------------------------------------------------------------------------ injecting
def add_adapters(model: Any, settings: AdapterSettings) -> None:
    """Puts adapters beside the projections that `settings` name, which change nothing until they have learnt. All
    other weights are frozen."""
    with torch.random.fork_rng(devices=[]):  # peft draws numbers that are not used
        inject(model, settings)
    reset_adapters(model, settings.seed)


def inject(model: Any, settings: AdapterSettings, empty: bool = False) -> None:
    """Adapters with any numbers in them; `empty`: without, as tensors of the meta device."""
    config = library().LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=bound_modules(model, settings.targets, settings.vision_tower),
        task_type="CAUSAL_LM",
    )
    _inject(model, config, settings.dtype, empty)


def _inject(model: Any, config: Any, dtype: torch.dtype, empty: bool = False) -> None:
    library().inject_adapter_in_model(config, model, adapter_name=ADAPTER, low_cpu_mem_usage=empty)
    for parameter in adapter_parameters(model).values():
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    model.train(model.training)  # what is new is in training mode, whatever the model is in


def bound_modules(model: Any, targets: Sequence[str] | None, vision_tower: bool) -> list[str]:
    """The full names of the projections that get adapters. A target that names none is an error, since training would
    go on without it."""
    language, vision = _linears(model)
    searched = language + vision if vision_tower else language
    if targets is None:
        bound = searched
    else:
        bound = [name for name in searched if any(_ends(name, target) for target in targets)]
        if unknown := [target for target in targets if not any(_ends(name, target) for name in bound)]:
            raise ValueError(f"lora_target_modules: no projection is called {', '.join(unknown)}; {_has(model)}")
    if not bound:
        raise ValueError(f"lora_target_modules: nothing would get an adapter; {_has(model)}")
    if vision_tower and not set(vision) & set(bound):
        raise ValueError(f"lora_vision_tower: nothing in it would get an adapter; {_has(model)}")
    return bound


def layer_projections(model: Any) -> list[nn.Linear]:
    """Those of the language model's layers, without what adapters have of their own beside them."""
    return [model.get_submodule(name) for name in _linears(model)[0] if ".lora_" not in name]


def _linears(model: Any) -> tuple[list[str], list[str]]:
    """The projections of the language model's layers, and those of the vision tower."""
    inside = "model.language_model." if hasattr(model.model, "language_model") else "model."
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    parts = (f"{inside}layers.", "model.visual.")
    language, vision = ([name for name in names if name.startswith(part)] for part in parts)
    return language, vision


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _has(model: Any) -> str:
    """What there is to be named, for a message."""
    language, vision = ({name.rpartition(".")[2] for name in part} for part in _linears(model))
    told = f"its layers have {', '.join(sorted(language))}"
    return told + (f"; its vision tower (lora_vision_tower=true) has {', '.join(sorted(vision))}" if vision else "")


@torch.no_grad()
def reset_adapters(model: Any, seed: int) -> None:
    """As peft begins: one matrix random, the other zero. The same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    for layer in adapter_layers(model):
        low, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        low.copy_(nn.init.kaiming_uniform_(torch.empty(low.shape), a=math.sqrt(5), generator=generator))
        up.zero_()


def quantize_base(model: Any, device: torch.device) -> None:
    """The projections of the language model's layers in 4 bits; embeddings, output matrix, norms and vision tower stay
    as they are. All of it is on the device then."""
    quantize(model, _linears(model)[0], device)
    model.to(device)


# -------------------------------------------------------------------------------------------------------------- looking
def has_adapters(model: Any) -> bool:
    return bool(vars(model).get("peft_config"))


def adapter_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if ".lora_A." in name or ".lora_B." in name}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model as it was without them."""
    layers = adapter_layers(model)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


class MergedWeights(Mapping[str, Tensor]):
    """Every weight of a model as it would be without layers of peft, by its own name; each is merged when it is asked
    for, in float32."""

    def __init__(self, model: Any) -> None:
        self.model = model
        learnt = adapter_parameters(model).keys()
        plain = {name: tensor for name, tensor in model.state_dict().items() if name not in learnt}
        self._tensors = {name.replace(".base_layer.", "."): tensor for name, tensor in plain.items()}
        packed = four_bit_layers(model).items()
        self._packed = {f"{name.removesuffix('.base_layer')}.weight": layer for name, layer in packed}
        self._layers = {f"{name}.weight": module for name, module in model.named_modules() if hasattr(module, "lora_A")}

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        packed, layer = self._packed.get(name), self._layers.get(name)
        weight = self._tensors[name] if packed is None else packed.weight
        if layer is None:
            return whole(weight)
        if not is_split(self.model):
            return (weight.float() + layer.get_delta_weight(ADAPTER).float()).to(weight.dtype)
        low, up = whole(layer.lora_A[ADAPTER].weight), whole(layer.lora_B[ADAPTER].weight)
        return (whole(weight).float() + (up @ low).float() * layer.scaling[ADAPTER]).to(weight.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors | self._packed)

    def __len__(self) -> int:
        return len(self._tensors | self._packed)


def merge_adapters(model: Any) -> None:
    """The model without adapters, which are in its weights from here on. These learn again."""
    merged = MergedWeights(model)
    for name, layer in [(name, module) for name, module in model.named_modules() if hasattr(module, "lora_A")]:
        layer.base_layer.weight.data = merged[f"{name}.weight"]
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer.base_layer)
    del model.peft_config
    model.requires_grad_(True)


# ----------------------------------------------------------------------------------------------------- to disk and back
def is_adapter(path: str | Path) -> bool:
    """Whether a directory holds adapters of another model, rather than a model."""
    return Path(path, CONFIG).is_file()


def base_path(path: str | Path) -> str:
    """Where the base of a model lies: the path itself, unless it holds adapters."""
    if not is_adapter(path):
        return str(path)
    base = read_json_object(Path(path, CONFIG)).get(BASE)
    if not isinstance(base, str) or not base:
        raise ValueError(f"{Path(path, CONFIG)} does not say which model its adapters are for ({BASE})")
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise ValueError(f"{path} holds adapters of {base}, which is not there; put it back, or name it in {CONFIG}")
    return base


def adapter_tensors(model: Any) -> dict[str, Tensor]:
    """The adapters' own tensors by their names in peft's files."""
    return {_stored(name): parameter.detach() for name, parameter in adapter_parameters(model).items()}


def _stored(name: str) -> str:
    return PREFIX + name.replace(f".{ADAPTER}.", ".")


def save_adapters(model: Any, tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Writes `tensors`, which are a model's adapters now or at an earlier moment. The base's config.json stays with the
    base: transformers takes a folder that has one for a whole model."""
    settings = model.peft_config[ADAPTER]
    given = model.name_or_path
    setattr(settings, BASE, str(Path(given).resolve()) if Path(given).exists() else given)
    settings.save_pretrained(directory)
    save_file({name: each.contiguous() for name, each in tensors.items()}, directory / WEIGHTS, {"format": "pt"})
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(directory)


@torch.no_grad()
def load_adapters(model: Any, directory: Path) -> None:
    """Takes over, in place, what `save_adapters` wrote of such a model."""
    saved = read_adapters(model, directory)
    for name, tensor in adapter_tensors(model).items():
        tensor.copy_(saved[name])


def read_adapters(model: Any, directory: Path) -> dict[str, Tensor]:
    """What `save_adapters` wrote of such a model; anything missing or left over is an error."""
    own, saved = adapter_tensors(model), _read(directory)
    wrong = {
        "missing": own.keys() - saved.keys(),
        "unknown": saved.keys() - own.keys(),
        "of another size": {name for name in own.keys() & saved.keys() if own[name].shape != saved[name].shape},
    }
    if told := [f"{len(names)} {what} ({min(names)})" for what, names in wrong.items() if names]:
        raise ValueError(f"its adapters are {', '.join(told)}")
    now, then = model.peft_config[ADAPTER], read_json_object(directory / CONFIG)
    if (now.r, now.lora_alpha) != (then.get("r"), then.get("lora_alpha")):
        raise ValueError(f"its adapters have rank {then.get('r')} and alpha {then.get('lora_alpha')}")
    return saved


def _read(directory: Path) -> dict[str, Tensor]:
    if not is_adapter(directory):
        raise ValueError(f"it has no adapters ({CONFIG})")
    try:
        return load_file(directory / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{WEIGHTS} cannot be read: {error}") from error


def merge_saved(model: Any, directory: Path) -> None:
    """Adapters of a directory into the weights of their base."""
    settings = library().LoraConfig.from_pretrained(directory)
    settings.lora_dropout = 0.0
    with torch.random.fork_rng(devices=[]):
        _inject(model, settings, torch.float32)
    load_adapters(model, directory)
    merge_adapters(model)
