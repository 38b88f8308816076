"""A model split over ranks by FSDP2 of PyTorch (`fully_shard`).

Every layer of the language model and every block of the vision tower is a unit: gathered before it computes, split
again afterwards. All that stands outside of them (embeddings, output matrix or value head, norms, the ends of the
tower) belongs to the root, which is whole for the length of a pass. A pass is therefore anything that `in_one_pass`
runs: models are read piece by piece here (`backbone.py`), never by their own `forward`, which alone FSDP would know.

Weights of the loss are global before anything is split (`LossWeights`), so gradients are summed over ranks, and never
averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from mtrl.models.parallel.ranks import Ranks

Strategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"]
Result = TypeVar("Result")
PASS = "run_pass"  # a method that models get here: FSDP takes a call of it for a forward
COMPUTES_ON = "computes_on"  # an attribute that they get: their weights may lie in main memory


@dataclass(frozen=True, eq=False)
class Sharding:
    """How models are split. `per_node`: ranks of one machine, within which HYBRID_SHARD splits. With `cpu_offload`
    weights, and with them gradients and optimizer state, lie in main memory; a unit is on the device while it computes.
    """

    ranks: Ranks
    device: torch.device
    strategy: Strategy = "FULL_SHARD"
    per_node: int = 1
    compute_dtype: torch.dtype | None = None  # what weights are gathered in; None: what they are kept in
    cpu_offload: bool = False

    def mesh(self) -> DeviceMesh:
        """Ranks in a row, or rows of ranks that hold the same."""
        world = self.ranks.size
        within = {"HYBRID_SHARD": self.per_node, "NO_SHARD": 1}.get(self.strategy, world)
        if world % within:
            raise ValueError(f"{world} ranks cannot be split into groups of {within}")
        if within == world:
            return init_device_mesh(self.device.type, (world,))
        return init_device_mesh(self.device.type, (world // within, within), mesh_dim_names=("replicate", "shard"))

    def split(self, model: Any) -> None:
        """Splits a model in place. One on the meta device gets room and no numbers, a unit at a time: no rank ever
        holds more of it than its own part and one unit. `fill` brings the numbers."""
        mesh = self.mesh()
        in_main_memory = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        narrow = self.compute_dtype if self.compute_dtype != model.dtype else None
        options: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": self.strategy != "SHARD_GRAD_OP",
            # Sums of gradients are taken in float32; a pass brings its inputs in the right dtype itself.
            "mp_policy": MixedPrecisionPolicy(narrow, torch.float32, cast_forward_inputs=False),
            "offload_policy": in_main_memory if self.cpu_offload else OffloadPolicy(),
        }
        given: dict[nn.Parameter, nn.Parameter] = {}
        for unit in [*units(model), model]:
            make_room(unit, self.device, given)
            fully_shard(unit, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo and NCCL both have sums
        setattr(model, COMPUTES_ON, self.device)
        setattr(model, PASS, _call)
        register_fsdp_forward_method(model, PASS)

    def spread(self, model: Any, load: Callable[[], Any]) -> Any:
        """Splits an empty model and fills it with what the first rank alone loads: main memory holds it once. Where
        that fails, all ranks raise the error."""
        self.split(model)
        source = self.ranks.rank0_only(load)
        fill(parameters_and_buffers(model), None if source is None else parameters_and_buffers(source), self.ranks)
        if source is not None:  # what a checkpoint says besides its weights goes with them, names in its files as well
            model.generation_config = getattr(source, "generation_config", None)
            model._weight_conversions = getattr(source, "_weight_conversions", None)
        return model


def units(model: Any) -> Iterator[nn.Module]:
    """What is gathered as one, in the order of a pass. Of models that are read by their own `forward` (reward models of
    any family) it is what transformers wants to stay together."""
    if not hasattr(model, "model"):
        yield from (each for each in model.modules() if type(each).__name__ in model._no_split_modules)
        return
    tower = getattr(model.model, "visual", None)
    if tower is not None:
        yield from tower.blocks
    yield from getattr(model.model, "language_model", model.model).layers


def make_room(module: nn.Module, device: torch.device, given: dict[nn.Parameter, nn.Parameter]) -> None:
    """Tensors of the meta device become real; tied weights stay one."""
    for part in module.modules():
        for name, tensor in part.named_parameters(recurse=False):
            if tensor.is_meta and tensor not in given:
                given[tensor] = nn.Parameter(torch.empty_like(tensor, device=device), tensor.requires_grad)
            if tensor.is_meta:
                part._parameters[name] = given[tensor]
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_meta:
                part._buffers[name] = torch.empty_like(buffer, device=device)


def _call(work: Callable[[], Result]) -> Result:
    return work()


def is_split(model: Any) -> bool:
    return isinstance(model, FSDPModule)


def compute_device(model: Any) -> torch.device:
    """Where a model computes."""
    device: torch.device = getattr(model, COMPUTES_ON, model.device)
    return device


def plain_class(model: Any) -> Any:
    """The class that a model had before it was split."""
    return type(model).__mro__[2] if is_split(model) else type(model)


def in_one_pass(model: Any, work: Callable[[], Result]) -> Result:
    """What `work` makes, while all of the model that is not within a unit is whole. Gradients flow back from tensors
    in the result, which must stand in plain tuples and dictionaries."""
    if not is_split(model):
        return work()
    result: Result = getattr(model, PASS)(work)
    if not torch.is_grad_enabled():
        split_again(model)
    return result


def while_whole(model: Any, work: Callable[[], Result]) -> Result:
    """The same for a model that does not learn, whatever else learns meanwhile: nothing flows back to it."""
    if not is_split(model):
        return work()
    found: list[Result] = []
    getattr(model, PASS)(lambda: found.append(work()))
    split_again(model)
    return found[0]


def split_again(model: nn.Module) -> None:
    """After a pass from which no gradient comes back: that alone would make FSDP split what it keeps whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# -------------------------------------------------------------------------------------------------------- whole tensors
def whole(tensor: Tensor) -> Tensor:
    """A tensor gathered from all ranks, where it is split; all of them must ask for it. Parts that lie in main memory
    go by way of the devices, which are faster at it."""
    if not isinstance(tensor, DTensor):
        return tensor
    part, mesh = own_part(tensor), tensor.device_mesh
    if part.device.type != mesh.device_type:
        options: Any = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
        tensor = DTensor.from_local(part, mesh, tensor.placements, **options)
    return tensor.full_tensor()


def is_part(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def own_part(tensor: Tensor) -> Tensor:
    """The part that this rank holds, the very memory."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fill(targets: Mapping[str, Tensor], source: Mapping[str, Tensor] | None, ranks: Ranks) -> None:
    """Numbers of the first rank's `source` into tensors of the same names that are split over ranks, or that all have;
    other ranks give none. One tensor at a time is whole."""
    for name, target in targets.items():
        device = target.device_mesh.device_type if isinstance(target, DTensor) else target.device
        if ranks.is_first:
            assert source is not None
            value = source[name].detach().to(device, target.dtype).reshape(target.shape).contiguous()
        else:
            value = torch.empty(target.shape, dtype=target.dtype, device=device)
        if ranks.size > 1:
            dist.broadcast(value, src=0)
        if isinstance(target, DTensor):
            value = own_part(distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None))
        own_part(target).copy_(value)


def parameters_and_buffers(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, also those that no checkpoint holds; tied ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def gathered(tensors: Mapping[str, Tensor], names: Iterable[str], kept: Collection[str]) -> dict[str, Tensor]:
    """Whole tensors in main memory, of each rank those that it is to keep. All ranks gather the same, one at a time."""
    found = {}
    for name in names:
        value = whole(tensors[name])
        if name in kept:
            found[name] = value.detach().to("cpu", copy=True)
    return found
