"""New weights for an engine in this process, copied straight to where vLLM holds them.

vLLM's loader rebuilds every layer for each set of weights. Here its own code says once where each weight goes: it loads
stand-ins, and the copies that it would make are recorded instead of made.

    model.layers.0.self_attn.k_proj.weight  ->  rows 2048 to 2303 of model.layers.0.self_attn.qkv_proj.weight

The record is then verified by bits: after the loader has loaded random numbers in the usual way, every parameter must
hold what the record says, and no other tensor of the model may have changed with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mtrl.models.state_dicts import Form

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element
Storage = tuple[int, int]  # its address, and the bytes of an element, by which a Place counts
HELPERS = ("impl", "quant_method")  # objects of a layer that are no modules and may hold tensors
COPY, FILL = torch.ops.aten.copy_.default, (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


class Unexplained(Exception):
    """vLLM does more with a weight than to copy it. The message begins with a name."""


@dataclass(frozen=True)
class Place:
    """A part of a contiguous tensor, or of a storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def where(cls, view: Tensor) -> Place:
        return cls(tuple(view.size()), view.stride(), int(view.storage_offset()))

    def of(self, whole: Tensor) -> Tensor:
        whole = whole.detach().contiguous()
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)


@dataclass(frozen=True)
class DirectWeights:
    """For each weight, by its name in checkpoints, its parts and where each is in the engine."""

    forms: Mapping[str, Form]
    parts: Mapping[str, list[tuple[Place, Tensor]]]
    overwritten: frozenset[tuple[int, int]]  # the address and the bytes of every parameter, all of which are written

    @torch.no_grad()
    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Reads each tensor once and in order: they may be gathered from ranks, or received one by one."""
        if tensors.keys() != self.forms.keys():
            raise ValueError(f"other weights than before: {sorted(tensors.keys() ^ self.forms.keys())[:3]}")
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != self.forms[name][1]:
                raise ValueError(f"{name} has the shape {tuple(tensor.shape)} instead of {self.forms[name][1]}")
            for place, target in self.parts[name]:
                target.copy_(place.of(tensor), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # from here on the tensors may change


def learn_places(worker: Any, forms: Mapping[str, Form]) -> DirectWeights:
    """Runs in vLLM's worker. Afterwards, or if it raises Unexplained, the engine may hold random numbers."""
    model: nn.Module = worker.get_model()
    parts = record_places(worker, forms)
    wholes = [each for each in model.parameters() if each.is_contiguous()]
    direct = DirectWeights(forms, parts, frozenset((each.data_ptr(), each.nbytes) for each in wholes))
    targets = {storage(target) for parts in direct.parts.values() for _, target in parts}
    used = {name: form for name, form in forms.items() if direct.parts[name]}  # tied ones under one of their names
    device, before = next(model.parameters()).device, fingerprints(model, targets)
    worker.reload_weights(weights_iterator=random_weights(used, device))
    for name, tensor in random_weights(used, device):
        for place, target in direct.parts[name]:
            if not torch.equal(bits(target), bits(place.of(tensor).to(target.dtype))):
                raise Unexplained(f"{name} is changed after it was loaded")
    after = fingerprints(model, targets)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            raise Unexplained(f"{name} depends on weights")
    return direct


def record_places(worker: Any, forms: Mapping[str, Form]) -> dict[str, list[tuple[Place, Tensor]]]:
    """The model loads stand-ins and stays as it is."""
    from vllm.config import set_current_vllm_config

    model: Any = worker.get_model()
    recorder = Recorder(model)
    with set_current_vllm_config(worker.vllm_config), recorder, torch.no_grad():
        try:
            model.load_weights(recorder.stand_ins(forms, next(model.parameters()).device))
        except Unexplained:
            raise
        except Exception as error:  # of any kind: the loader meets a parameter in another layout than at the start
            raise Unexplained(f"{recorder.name} cannot be loaded in place: {error or type(error).__name__}") from error
    for name, parameter in model.named_parameters():
        elements = parameter.untyped_storage().nbytes() // parameter.element_size()
        written = torch.zeros(elements, dtype=torch.bool, device=parameter.device)
        for place in recorder.written[storage(parameter)]:
            place.of(written).fill_(True)
        if not Place.where(parameter).of(written).all():
            raise Unexplained(f"{name} does not come from a checkpoint alone")
    parts: dict[str, list[tuple[Place, Tensor]]] = {name: [] for name in forms}
    for name, place, target in recorder.copies.values():
        parts[name].append((place, target))
    return parts


class Recorder(TorchDispatchMode):
    """Records what would be copied from stand-ins. They may only be viewed and copied; tensors of the model may only be
    copied to, or filled with a constant."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        held = (*model.parameters(), *model.buffers())
        self.written: dict[Storage, list[Place]] = {storage(each): [] for each in held}
        # By storage and place: what is written twice holds what came last.
        self.copies: dict[tuple[Storage, Place], tuple[str, Place, Tensor]] = {}
        self.name, self.stand_in = "the first weight", torch.empty(0)

    def stand_ins(self, forms: Mapping[str, Form], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        for name, (dtype, shape) in forms.items():
            self.name, self.stand_in = name, torch.empty(shape, dtype=dtype, device=device)
            yield name, self.stand_in

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [each for each in args if isinstance(each, Tensor)]
        is_target = bool(tensors) and storage(tensors[0]) in self.written
        is_copy = func is COPY and self._reads_stand_in(tensors[1:])
        if is_target and (is_copy or func in FILL):
            target, place = tensors[0].detach(), Place.where(tensors[0])
            self.written[storage(target)].append(place)
            if is_copy:
                source = Place.where(tensors[1].expand(target.shape))
                self.copies[storage(target), place] = self.name, source, target
            return args[0]
        if is_target and func._schema.is_mutable:
            raise Unexplained(f"{self.name} is written by {func}")
        result = func(*args, **(kwargs or {}))
        if self._reads_stand_in(tensors) and not is_view(result, self.stand_in):
            raise Unexplained(f"{self.name} is read by {func}")
        return result

    def _reads_stand_in(self, tensors: list[Tensor]) -> bool:
        return any(storage(each) == storage(self.stand_in) for each in tensors)


def is_view(result: Any, of: Tensor) -> bool:
    results = result if isinstance(result, list | tuple) else [result]
    return all(isinstance(each, Tensor) and storage(each) == storage(of) for each in results)


def random_weights(forms: Mapping[str, Form], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The same numbers in every call, one tensor at a time."""
    for seed, (name, (dtype, shape)) in enumerate(forms.items()):
        dice = torch.Generator(device).manual_seed(seed)
        yield name, torch.randn(shape, generator=dice, device=device, dtype=torch.float32).to(dtype)


def fingerprints(model: nn.Module, left_out: set[Storage]) -> dict[str, int]:
    """A sum over the bits of every other tensor that a layer holds, by name."""
    found: dict[str, int] = {}
    for path, module in model.named_modules():
        owners = [module, *(getattr(module, name, None) for name in HELPERS)]
        holders = [module._buffers, *(getattr(owner, "__dict__", {}) for owner in owners)]
        for name, held in [(name, held) for holder in holders for name, held in holder.items()]:
            if isinstance(held, Tensor) and not held.is_meta and storage(held) not in left_out:
                found[f"{path}.{name}"] = int(bits(held).sum(dtype=torch.int64))
    return found


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().view(BITS[tensor.element_size()])


def storage(tensor: Tensor) -> Storage:
    return int(tensor.untyped_storage()._cdata), tensor.element_size()
