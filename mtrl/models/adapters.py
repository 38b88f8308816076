"""LoRA adapters by the peft library.

They are injected: the model stays a Hugging Face model with some projections replaced, so code that works on it still
works. With its adapters off a model is its base, so a reference takes no second copy. On disk adapters are peft files,
which name their base.
"""

from __future__ import annotations

import json
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

from mtrl.models.checkpoint_files import ADAPTER_BASE, ADAPTER_CONFIG, is_adapter, read_json_object
from mtrl.models.families import find_family
from mtrl.models.parallel.fsdp import compute_device, full_tensor, is_sharded
from mtrl.models.quantized import four_bit_layers, quantize

ADAPTER = "default"  # peft's name for the only adapter of a model
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # starts every name in peft's files


@dataclass(frozen=True)
class AdapterSettings:
    """`lora_target_modules` are suffixes of module names; None: every projection of the layers. Adapters are stored in
    `dtype`."""

    lora_rank: int = 8
    lora_alpha: int = 16
    lora_target_modules: tuple[str, ...] | None = None
    lora_vision_tower: bool = False
    lora_dropout: float = 0.0
    dtype: torch.dtype = torch.float32
    seed: int = 0


def import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ValueError("adapters need the library peft: pip install 'mtrl[lora]'") from error
    return peft


# ------------------------------------------------------------------------------------------------------------ injecting
def add_adapters(model: Any, settings: AdapterSettings) -> None:
    """Add initial adapters, which do not change the output, and freeze all other weights."""
    with torch.random.fork_rng(devices=[]):  # peft draws numbers that are not used
        inject_adapters(model, settings)
    reset_adapters(model, settings.seed)


def inject_adapters(model: Any, settings: AdapterSettings, empty: bool = False) -> None:
    """Inject adapters with arbitrary numbers; `empty`: on the meta device."""
    config = import_peft().LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=find_target_modules(model, settings.lora_target_modules, settings.lora_vision_tower),
        task_type="CAUSAL_LM",
    )
    _inject(model, config, settings.dtype, empty)


def _inject(model: Any, config: Any, dtype: torch.dtype, empty: bool = False) -> None:
    # For some types of models (glm4v_moe) peft takes the names of dense layers and shared experts for those of all
    # experts, and adds adapters to these instead. In a module without a type it takes names as they are.
    holder: Any = nn.ModuleDict({"base": model})
    import_peft().inject_adapter_in_model(config, holder, adapter_name=ADAPTER, low_cpu_mem_usage=empty)
    model.peft_config = holder.peft_config
    for parameter in adapter_parameters(model).values():
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    model.train(model.training)  # new modules are in training mode, whatever the model is in


def find_target_modules(model: Any, targets: Sequence[str] | None, vision_tower: bool) -> list[str]:
    """The full names of the projections that get adapters. Raises a ValueError for a target without projections, since
    training would silently ignore it."""
    language, vision = find_family(model.config).list_projections(model)
    names = language + vision if vision_tower else language
    if targets is not None:
        names = [name for name in names if any(_ends_with(name, target) for target in targets)]
        if unknown := [target for target in targets if not any(_ends_with(name, target) for name in names)]:
            raise ValueError(f"lora_target_modules: no projection is called {', '.join(unknown)}; {_list_names(model)}")
    if not names:
        raise ValueError(f"lora_target_modules: nothing would get an adapter; {_list_names(model)}")
    if vision_tower and not set(vision) & set(names):
        raise ValueError(f"lora_vision_tower: nothing in it would get an adapter; {_list_names(model)}")
    return names


def layer_projections(model: Any) -> list[nn.Linear]:
    """The projections of the language model's layers, without the matrices of adapters."""
    names = find_family(model.config).list_projections(model)[0]
    return [model.get_submodule(name) for name in names if ".lora_" not in name]


def _ends_with(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def _list_names(model: Any) -> str:
    """The possible targets, for a message."""
    parts = find_family(model.config).list_projections(model)
    language, vision = ({name.rpartition(".")[2] for name in part} for part in parts)
    layers = f"its layers have {', '.join(sorted(language))}"
    return layers + (f"; its vision tower (lora_vision_tower=true) has {', '.join(sorted(vision))}" if vision else "")


@torch.no_grad()
def reset_adapters(model: Any, seed: int) -> None:
    """Initialize as peft does: one matrix random, the other zero. The numbers are the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    for layer in adapter_layers(model):
        low, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        low.copy_(nn.init.kaiming_uniform_(torch.empty(low.shape), a=math.sqrt(5), generator=generator))
        up.zero_()


def quantize_base(model: Any, device: torch.device, keep: torch.device | None = None) -> None:
    """Quantize the projections of the language model's layers to 4 bits, not embeddings, output matrix, norms and
    vision tower, on the device, and move the model there, or to `keep`."""
    keep = keep or device
    quantize(model, find_family(model.config).list_projections(model)[0], device, keep)
    model.to(keep)


# -------------------------------------------------------------------------------------------------------------- reading
def has_adapters(model: Any) -> bool:
    return bool(vars(model).get("peft_config"))


def adapter_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if ".lora_A." in name or ".lora_B." in name}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapters: the model is its base."""
    layers = adapter_layers(model)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


class MergedWeights(Mapping[str, Tensor]):
    """Every weight of a model with its adapter merged into it, by its name without peft; merged on access, in
    float32."""

    def __init__(self, model: Any) -> None:
        self.model = model
        adapters = adapter_parameters(model).keys()
        base = {name: tensor for name, tensor in model.state_dict().items() if name not in adapters}
        self._tensors = {name.replace(".base_layer.", "."): tensor for name, tensor in base.items()}
        packed = four_bit_layers(model).items()
        self._packed = {f"{name.removesuffix('.base_layer')}.weight": layer for name, layer in packed}
        self._layers = {f"{name}.weight": module for name, module in model.named_modules() if hasattr(module, "lora_A")}

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        packed, layer = self._packed.get(name), self._layers.get(name)
        weight = self._tensors[name] if packed is None else packed.weight
        if layer is None:
            return full_tensor(weight)
        if not is_sharded(self.model):
            device = compute_device(self.model)
            return (weight.to(device).float() + _delta_weight(layer, device).float()).to(weight.dtype)
        low, up = full_tensor(layer.lora_A[ADAPTER].weight), full_tensor(layer.lora_B[ADAPTER].weight)
        return (full_tensor(weight).float() + (up @ low).float() * layer.scaling[ADAPTER]).to(weight.dtype)

    def form(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of a weight, without merging it; a packed one is unpacked to floating-point numbers."""
        if (layer := self._packed.get(name)) is not None:
            return torch.float32, (layer.out_features, layer.in_features)
        return self._tensors[name].dtype, tuple(self._tensors[name].shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors | self._packed)

    def __len__(self) -> int:
        return len(self._tensors | self._packed)


def _delta_weight(layer: Any, device: torch.device) -> Tensor:
    """peft's product of the adapter's matrices. Offloaded ones are multiplied on the device, which rounds as it does
    for all others."""
    low, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    if low.device == device:
        return layer.get_delta_weight(ADAPTER)
    return (up.to(device) @ low.to(device)) * layer.scaling[ADAPTER]


def merge_adapters(model: Any) -> None:
    """Merge the adapters into the model's weights, which become trainable, and remove them."""
    merged = MergedWeights(model)
    for name, layer in [(name, module) for name, module in model.named_modules() if hasattr(module, "lora_A")]:
        layer.base_layer.weight.data = merged[f"{name}.weight"]
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer.base_layer)
    del model.peft_config
    model.requires_grad_(True)


# -------------------------------------------------------------------------------------------------------------- on disk
def adapter_tensors(model: Any) -> dict[str, Tensor]:
    """The adapters' tensors by their names in peft's files."""
    return {
        PREFIX + name.replace(f".{ADAPTER}.", "."): parameter.detach()
        for name, parameter in adapter_parameters(model).items()
    }


def save_adapters(model: Any, tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Write `tensors`, a model's adapters now or at an earlier moment. The base's config.json is not written:
    transformers takes a directory that has one for a whole model."""
    settings, base = model.peft_config[ADAPTER], model.name_or_path
    setattr(settings, ADAPTER_BASE, str(Path(base).resolve()) if Path(base).exists() else base)
    settings.save_pretrained(directory)
    # peft writes its sets in any order: the file would differ each time.
    written = read_json_object(directory / ADAPTER_CONFIG)
    ordered = {name: sorted(value) if isinstance(value, list) else value for name, value in written.items()}
    (directory / ADAPTER_CONFIG).write_text(json.dumps(ordered, indent=2, sort_keys=True), encoding="utf-8")
    save_file({name: each.contiguous() for name, each in tensors.items()}, directory / WEIGHTS, {"format": "pt"})
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(directory)


@torch.no_grad()
def load_adapters(model: Any, directory: Path) -> None:
    """Load, in place, adapters that `save_adapters` wrote for such a model."""
    saved = read_adapters(model, directory)
    for name, tensor in adapter_tensors(model).items():
        tensor.copy_(saved[name])


def read_adapters(model: Any, directory: Path) -> dict[str, Tensor]:
    """Read adapters that `save_adapters` wrote for such a model; missing or unknown tensors are an error."""
    if not is_adapter(directory):
        raise ValueError(f"it has no adapters ({ADAPTER_CONFIG})")
    try:
        saved = load_file(directory / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{WEIGHTS} cannot be read: {error}") from error
    own = adapter_tensors(model)
    wrong = {
        "missing": own.keys() - saved.keys(),
        "unknown": saved.keys() - own.keys(),
        "of another size": {name for name in own.keys() & saved.keys() if own[name].shape != saved[name].shape},
    }
    if problems := [f"{len(names)} {what} ({min(names)})" for what, names in wrong.items() if names]:
        raise ValueError(f"its adapters are {', '.join(problems)}")
    now, then = model.peft_config[ADAPTER], read_json_object(directory / ADAPTER_CONFIG)
    if (now.r, now.lora_alpha) != (then.get("r"), then.get("lora_alpha")):
        raise ValueError(f"its adapters have rank {then.get('r')} and alpha {then.get('lora_alpha')}")
    return saved


def merge_saved_adapters(model: Any, directory: Path) -> None:
    """Merge the adapters of a directory into the weights of their base."""
    settings = import_peft().LoraConfig.from_pretrained(directory)
    settings.lora_dropout = 0.0
    with torch.random.fork_rng(devices=[]):
        _inject(model, settings, torch.float32)
    load_adapters(model, directory)
    merge_adapters(model)
