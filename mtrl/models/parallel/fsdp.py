"""Models sharded over ranks by PyTorch's FSDP2 (`fully_shard`).

Every layer of the language model and every block of the vision tower is a unit: it is gathered before it computes and
resharded afterwards. Everything else (embeddings, output matrix or value head, norms, the ends of the tower) belongs to
the root module and is gathered for the length of a pass. A pass is anything that `run_forward` runs: this package calls
models module by module (`backbone.py`), never through their own `forward`, which is all that FSDP would know.

The weights of the loss are global before rows are distributed (`LossWeights`), so gradients are summed over ranks and
never averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
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

from mtrl.models.families import find_family
from mtrl.models.parallel.ranks import Ranks

Strategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"]
Result = TypeVar("Result")
RUN = "run_pass"  # a method that sharded models get: FSDP treats a call of it as a forward
COMPUTE_DEVICE = "compute_device"  # an attribute that they get, since their weights may be in CPU memory


@dataclass(frozen=True, eq=False)
class Sharding:
    """How models are sharded. `per_node`: ranks of one machine, within which HYBRID_SHARD shards. With `cpu_offload`
    weights, gradients and optimizer state are in CPU memory; a unit is on the device while it computes.
    """

    ranks: Ranks
    device: torch.device
    strategy: Strategy = "FULL_SHARD"
    per_node: int = 1
    compute_dtype: torch.dtype | None = None  # in which weights are gathered; None: the dtype in which they are stored
    cpu_offload: bool = False

    def mesh(self) -> DeviceMesh:
        """One row of ranks that shard the model, or several rows that each hold all of it."""
        world = self.ranks.size
        within = {"HYBRID_SHARD": self.per_node, "NO_SHARD": 1}.get(self.strategy, world)
        if world % within:
            raise ValueError(f"{world} ranks cannot be split into groups of {within}")
        if within == world:
            return init_device_mesh(self.device.type, (world,))
        return init_device_mesh(self.device.type, (world // within, within), mesh_dim_names=("replicate", "shard"))

    def shard(self, model: Any) -> None:
        """Shards a model in place. A model on the meta device is allocated unit by unit, so that no rank ever holds
        more than its shard and one unit; `distribute_from_rank0` brings the values."""
        cpu_offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        compute_dtype = self.compute_dtype if self.compute_dtype != model.dtype else None
        options: dict[str, Any] = {
            "mesh": self.mesh(),
            "reshard_after_forward": self.strategy != "SHARD_GRAD_OP",
            # Gradients are summed in float32; a pass casts its inputs itself.
            "mp_policy": MixedPrecisionPolicy(compute_dtype, torch.float32, cast_forward_inputs=False),
            "offload_policy": cpu_offload if self.cpu_offload else OffloadPolicy(),
        }
        allocated: dict[nn.Parameter, nn.Parameter] = {}
        for unit in [*find_units(model), model]:
            allocate(unit, self.device, allocated)
            fully_shard(unit, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo and NCCL both have sums
        setattr(model, COMPUTE_DEVICE, self.device)
        setattr(model, RUN, _call)
        register_fsdp_forward_method(model, RUN)

    def load_sharded(self, model: Any, load: Callable[[], Any]) -> Any:
        """Shards an empty model and fills it from the one that the first rank alone loads, so that CPU memory holds it
        once. If that fails, all ranks raise the error."""
        self.shard(model)
        source = self.ranks.rank0_only(load)
        tensors = None if source is None else parameters_and_buffers(source)
        distribute_from_rank0(parameters_and_buffers(model), tensors, self.ranks)
        if source is not None:  # attributes that a checkpoint sets in addition to the weights
            model.generation_config = getattr(source, "generation_config", None)
            model._weight_conversions = getattr(source, "_weight_conversions", None)
        return model


def find_units(model: Any) -> Iterator[nn.Module]:
    """The modules that are gathered as one, in the order of a pass. Models that run by their own `forward` (reward
    models of any family) name them for transformers."""
    if not hasattr(model, "model"):
        yield from (each for each in model.modules() if type(each).__name__ in model._no_split_modules)
        return
    yield from find_family(model.config).shard_units(model)


def allocate(module: nn.Module, device: torch.device, allocated: dict[nn.Parameter, nn.Parameter]) -> None:
    """Gives tensors on the meta device memory, without values; tied weights stay tied."""
    for part in module.modules():
        for name, tensor in part.named_parameters(recurse=False):
            if tensor.is_meta and tensor not in allocated:
                allocated[tensor] = nn.Parameter(torch.empty_like(tensor, device=device), tensor.requires_grad)
            if tensor.is_meta:
                part._parameters[name] = allocated[tensor]
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_meta:
                part._buffers[name] = torch.empty_like(buffer, device=device)


def _call(work: Callable[[], Result]) -> Result:
    return work()


def is_sharded(model: Any) -> bool:
    return isinstance(model, FSDPModule)


def compute_device(model: Any) -> torch.device:
    device: torch.device = getattr(model, COMPUTE_DEVICE, model.device)
    return device


def unsharded_class(model: Any) -> Any:
    """The class that a model had before it was sharded."""
    return type(model).__mro__[2] if is_sharded(model) else type(model)


def run_forward(model: Any, work: Callable[[], Result]) -> Result:
    """Runs `work` while the root module is gathered. Gradients flow back from tensors in the result, which must be in
    plain tuples and dictionaries."""
    if not is_sharded(model):
        return work()
    result: Result = getattr(model, RUN)(work)
    if not torch.is_grad_enabled():
        reshard(model)
    return result


def run_frozen_forward(model: Any, work: Callable[[], Result]) -> Result:
    """`run_forward` for a model that does not learn, whatever else learns meanwhile: no gradient flows back to it."""
    if not is_sharded(model):
        return work()
    results: list[Result] = []
    getattr(model, RUN)(lambda: results.append(work()))
    reshard(model)
    return results[0]


def reshard(model: nn.Module) -> None:
    """After a pass without a backward, which would otherwise make FSDP reshard the root."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# ------------------------------------------------------------------------------------------------------ sharded tensors
def weight_memory(model: nn.Module) -> list[Tensor]:
    """The tensors whose memory holds a model's weights. Sharded ones are padded on the last ranks."""
    if not is_sharded(model):
        return list(model.parameters())
    return [parameter._sharded_param_data for parameter in _fsdp_parameters(model)]


def view_weight_memory(model: nn.Module) -> None:
    """Makes the parameters of a sharded model views on its `weight_memory` again, after that has moved. (FSDP itself
    does so when `module.to` has moved the parameters, but it copies the padded ones for that.)"""
    for parameter in _fsdp_parameters(model):
        local, dim = parameter.sharded_param._local_tensor, parameter.fsdp_placement.dim
        padded = parameter._sharded_param_data.view(parameter.padded_sharded_param_size)
        local.data = padded.narrow(dim, 0, local.shape[dim] if local.numel() else 0)


def _fsdp_parameters(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                yield from group.fsdp_params


def full_tensor(tensor: Tensor) -> Tensor:
    """A tensor gathered from all ranks if it is sharded; all of them must call this. Shards in CPU memory are gathered
    through the devices, which is faster."""
    if not isinstance(tensor, DTensor):
        return tensor
    local, mesh = local_tensor(tensor), tensor.device_mesh
    through = cpu_mesh(mesh) if gathers_on_cpu(mesh) else mesh
    if through is not mesh or local.device.type != mesh.device_type:
        options: Any = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
        tensor = DTensor.from_local(local.to(through.device_type), through, tensor.placements, **options)
    return tensor.full_tensor().to(mesh.device_type)


def gathers_on_cpu(mesh: DeviceMesh) -> bool:
    """Whether ranks share a GPU and communicate by gloo: it has all other collectives on CUDA tensors, but the
    functional one that gathers them (`allgather_into_tensor_coalesced`) crashes, in torch 2.11."""
    return mesh.device_type == "cuda" and mesh.get_group(0)._get_backend(torch.device("cuda")).name() == "gloo"


@cache
def cpu_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks, for tensors in CPU memory; all of them must call this."""
    return DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)


def is_dtensor(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard, without a copy."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_place(tensor: Tensor) -> tuple[int, int]:
    """The number of this rank's shard, and into how many the tensor is cut; (0, 1) for a tensor that is whole."""
    if isinstance(tensor, DTensor):
        for dimension, placement in enumerate(tensor.placements):
            if placement.is_shard():
                return tensor.device_mesh.get_local_rank(dimension), tensor.device_mesh.size(dimension)
    return 0, 1


def shard_cuts(shape: Sequence[int], parts: int) -> list[int]:
    """Where the shards of a tensor begin in the flattened tensor, and the end of the last one. FSDP2 cuts along the
    first dimension: a shard is a range of the flattened tensor, and the last ones may be smaller or empty.

    >>> shard_cuts((5, 10), 3), shard_cuts((2, 10), 4)
    ([0, 20, 40, 50], [0, 10, 20, 20, 20])
    """
    rows, row = shape[0], math.prod(shape[1:])
    each = -(-rows // parts)
    return [min(number * each, rows) * row for number in range(parts + 1)]


def shard_range(tensor: Tensor) -> tuple[int, int]:
    """Begin and end of this rank's shard in the flattened tensor."""
    number, parts = shard_place(tensor)
    begin, end = shard_cuts(tensor.shape, parts)[number : number + 2]
    return begin, end


@torch.no_grad()
def distribute_from_rank0(targets: Mapping[str, Tensor], source: Mapping[str, Tensor] | None, ranks: Ranks) -> None:
    """Copies the first rank's `source` into the tensors of the same names, sharded or not, of all ranks; the others
    give None. One tensor at a time is whole."""
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
            value = local_tensor(distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None))
        local_tensor(target).copy_(value)


def parameters_and_buffers(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, also those that no checkpoint holds; tied ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@torch.no_grad()
def copy_model(target: nn.Module, source: nn.Module) -> None:
    """Copies all values in place between models that are sharded alike, or not at all."""
    tensors = parameters_and_buffers(source)
    for name, tensor in parameters_and_buffers(target).items():
        local_tensor(tensor).copy_(local_tensor(tensors[name]))


def gather_on_cpu(tensors: Mapping[str, Tensor], names: Iterable[str], keep: Collection[str]) -> dict[str, Tensor]:
    """Gathers tensors one at a time, together with all other ranks; returns those of `keep` in CPU memory."""
    kept = {}
    for name in names:
        value = full_tensor(tensors[name])
        if name in keep:
            kept[name] = value.detach().to("cpu", copy=True)
    return kept
