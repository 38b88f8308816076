"""Snapshots of a learner's state, and how they are written and read. No pickle: safetensors and JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtrl.checkpoint import sharded_files
from mtrl.checkpoint.sharded_files import FilePlan
from mtrl.models.checkpoint_files import WEIGHTS, convert_disk_errors
from mtrl.models.device_copy import copy_to_cpu
from mtrl.models.parallel.fsdp import distribute_from_rank0, gather_on_cpu, is_dtensor, is_sharded, local_tensor
from mtrl.models.parallel.ranks import SINGLE_PROCESS, Ranks
from mtrl.models.state_dicts import GatheredWeights, checkpoint_weights, map_file_names, save_config, save_model

# In a separate folder: inference servers read every *.safetensors next to a model's config as its weights.
OPTIMIZER_STATE = "trainer/optimizer.safetensors"  # tensors by parameter and kind: `<parameter>/exp_avg`, ..
COUNTERS = "trainer/optimizer.json"
SUFFIX = ".safetensors"

Tensors = Mapping[str, Tensor]
Names = Mapping[Any, str]  # the name of each parameter


@dataclass(frozen=True, eq=False)
class ModelSnapshot:
    """The live weights of a model: it must be written before the next update, or be `detached` first."""

    copied = False
    model: Any  # its settings go next to the weights
    weights: Tensors  # by their names in the checkpoint (`checkpoint_weights`)

    @property
    def nbytes(self) -> int:
        return _tensor_bytes(self.weights)

    def detached(self) -> Self:
        """A copy in CPU memory, which later updates do not change."""
        return replace(self, weights=_copy_to_cpu(self.weights))

    def write(self, directory: Path) -> None:
        with convert_disk_errors():
            save_model(self.model, self.weights, directory)


@dataclass(frozen=True, eq=False)
class LearnerSnapshot(ModelSnapshot):
    """The state of a learner: its weights and everything that its next update depends on."""

    optimizer_state: Tensors
    counters: Mapping[str, int]
    files: Mapping[str, bytes]  # files of the tokenizer and the processors, by name

    @property
    def nbytes(self) -> int:
        return _tensor_bytes(self.weights, self.optimizer_state) + sum(map(len, self.files.values()))

    def detached(self) -> Self:
        return replace(super().detached(), optimizer_state=_copy_to_cpu(self.optimizer_state))

    def write(self, directory: Path) -> None:
        (directory / OPTIMIZER_STATE).parent.mkdir()
        super().write(directory)
        with convert_disk_errors():
            state = {name: tensor.contiguous() for name, tensor in self.optimizer_state.items()}
            save_file(state, directory / OPTIMIZER_STATE)
        _write_other_files(directory, self.counters, self.files)


def make_snapshot(
    model: Any,
    optimizer: torch.optim.Optimizer,
    names: Names,
    counters: Mapping[str, int],
    files: Mapping[str, bytes],
    ranks: Ranks = SINGLE_PROCESS,
) -> LearnerSnapshot | RankSnapshot:
    """The state of a learner. If it is sharded, this is a copy: each rank gathers the files that it will write."""
    state = read_optimizer_state(optimizer, names)
    if is_sharded(model):
        return make_rank_snapshot(model, ranks, checkpoint_weights(model), state, counters, files)
    return LearnerSnapshot(model, checkpoint_weights(model), state, counters, files)


# ---------------------------------------------------------------------------------------------- one of several ranks
@dataclass(frozen=True, eq=False)
class RankSnapshot:
    """The files that one rank writes of a sharded learner (`sharded_files.py`), a copy in CPU memory. The first rank
    also writes everything that is not a tensor."""

    copied = True
    model: Any
    rank: int
    ranks: int
    plan: FilePlan
    weights: Tensors  # contents of this rank's files, by their names there
    state_plan: FilePlan | None = None  # None: the model does not learn
    optimizer_state: Tensors = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        files = sum(map(len, self.files.values())) if self.rank == 0 else 0
        return _tensor_bytes(self.weights, self.optimizer_state) + files

    def detached(self) -> Self:
        return self

    def write(self, directory: Path) -> None:
        is_first = self.rank == 0
        with convert_disk_errors():
            if self.plan.is_single and is_first:
                save_model(self.model, self.weights, directory)
            elif not self.plan.is_single:
                self.plan.write(self.weights, directory, self.rank, self.ranks)
            if self.state_plan is not None:
                (directory / OPTIMIZER_STATE).parent.mkdir(exist_ok=True)
                self.state_plan.write(self.optimizer_state, directory, self.rank, self.ranks)
        if is_first and not self.plan.is_single:
            save_config(self.model, directory)
            self.plan.write_index(directory)
        if is_first and self.state_plan is not None:
            _write_other_files(directory, self.counters, self.files)


def _write_other_files(directory: Path, counters: Mapping[str, int], files: Mapping[str, bytes]) -> None:
    (directory / COUNTERS).write_text(json.dumps(counters))
    for name, content in files.items():
        (directory / name).write_bytes(content)


def make_rank_snapshot(
    model: Any,
    ranks: Ranks,
    weights: Tensors,
    state: Tensors | None = None,
    counters: Mapping[str, int] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> RankSnapshot:
    """This rank's snapshot; all ranks make theirs together. `state`: of the optimizer, if the model learns."""
    rank, size = ranks.rank, ranks.size
    plan, own = gather_own_weights(model, weights, ranks)
    if state is None:
        return RankSnapshot(model, rank, size, plan, own)
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in state.items()}
    state_plan = FilePlan.make(OPTIMIZER_STATE.removesuffix(SUFFIX), sizes, sharded_files.FILE_BYTES)
    own_state = gather_on_cpu(state, state, state_plan.rank_tensors(rank, size))
    return RankSnapshot(model, rank, size, plan, own, state_plan, own_state, counters or {}, files or {})


def gather_own_weights(model: Any, weights: Tensors, ranks: Ranks) -> tuple[FilePlan, Tensors]:
    """The plan of the weight files, and the weights that this rank writes. The first rank writes adapters, weights
    whose shapes differ in checkpoints, and models of a single file, all by the model's names, for `save_model`."""
    if isinstance(weights, GatheredWeights):
        names = ranks.broadcast_object(ranks.rank0_only(partial(map_file_names, model, weights)))
        if names is not None:
            sizes = {names[name]: weights.count_bytes(name) for name in names}
            plan = FilePlan.make(WEIGHTS.removesuffix(SUFFIX), sizes, sharded_files.FILE_BYTES)
            if not plan.is_single:
                in_files = plan.rank_tensors(ranks.rank, ranks.size)
                own = gather_on_cpu(weights, names, {name for name in names if names[name] in in_files})
                return plan, {names[name]: tensor for name, tensor in own.items()}
    plan = FilePlan(WEIGHTS.removesuffix(SUFFIX), (tuple(weights),), 0)
    return plan, gather_tied_weights(model, weights, plan.rank_tensors(ranks.rank, ranks.size))


def gather_tied_weights(model: Any, weights: Tensors, keep: Collection[str]) -> dict[str, Tensor]:
    """The full weights of a sharded model; tied ones share memory again."""
    gathered, first_names = gather_on_cpu(weights, weights, keep), dict[int, str]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(parameter), name)
        if first != name and first in gathered and name in gathered:
            gathered[name] = gathered[first]
    return gathered


def read_optimizer_state(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, Tensor]:
    """The optimizer's state by parameter name and kind."""
    return {
        f"{names[parameter]}/{kind}": tensor
        for parameter, state in optimizer.state.items()
        for kind, tensor in state.items()
    }


def restore_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Names, directory: Path, stays: bool = False, ranks: Ranks = SINGLE_PROCESS
) -> None:
    """Inverse of `read_optimizer_state`; a parameter without a gradient so far has no state. The state goes to the
    device of its parameter, unless it `stays` in CPU memory. The first rank reads one file after the other and never
    holds more."""
    read: dict[str, Tensor] = {}
    for file in ranks.broadcast_object(list_state_files(directory)):
        read |= _shard_states(names, ranks.rank0_only(partial(load_file, file)), ranks, stays)
    saved: dict[str, dict[str, Tensor]] = {}
    for key, tensor in read.items():
        name, _, kind = key.rpartition("/")
        saved.setdefault(name, {})[kind] = tensor
    if unknown := saved.keys() - set(names.values()):
        file = directory / OPTIMIZER_STATE
        raise ValueError(f"{file} holds parameters that this run does not train: {sorted(unknown)[:3]}")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = {number: saved[names[each]] for number, each in enumerate(parameters) if names[each] in saved}
    steps = {number: {"step": state["step"]} for number, state in states.items()}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": steps})
    for number, state in states.items():  # set directly: load_state_dict would cast them to the parameter's dtype
        parameter = parameters[number]
        others = {kind: tensor for kind, tensor in state.items() if kind != "step"}
        moved = others if stays else {kind: tensor.to(parameter.device) for kind, tensor in others.items()}
        optimizer.state[parameter].update(moved)


def list_state_files(directory: Path) -> list[Path]:
    """The files of an optimizer's state: one, or several that ranks have written."""
    file = directory / OPTIMIZER_STATE
    return sorted(file.parent.glob(f"{file.stem}-*-of-*{SUFFIX}")) or [file]


def _shard_states(names: Names, read: Tensors | None, ranks: Ranks, stays: bool) -> Tensors:
    """The states that the first rank has read, sharded like their parameters; those that `stay` in CPU memory are there
    from the beginning."""
    parameters = {name: parameter for parameter, name in names.items()}
    if not any(map(is_dtensor, parameters.values())):
        return read or {}
    formats = ranks.broadcast_object({key: (each.shape, each.dtype) for key, each in (read or {}).items()})
    states = {}
    for key, (shape, dtype) in formats.items():
        like = parameters.get(key.rpartition("/")[0])
        fits = like is not None and like.shape == shape
        states[key] = torch.zeros_like(like, dtype=dtype) if fits else torch.zeros(shape, dtype=dtype)  # type: ignore
        if stays:  # only the local data: the DTensor itself must stay on its parameter's device
            local = local_tensor(states[key])
            local.data = local.cpu()
    distribute_from_rank0(states, read, ranks)
    return states


def read_counters(directory: Path) -> dict[str, int]:
    return json.loads((directory / COUNTERS).read_text())


def _copy_to_cpu(tensors: Tensors) -> dict[str, Tensor]:
    """Copies in CPU memory; tensors that share memory (tied weights) share it afterwards too."""
    distinct = _by_memory(tensors)
    copies = dict(zip(distinct, copy_to_cpu(list(distinct.values())), strict=True))
    return {name: copies[_memory(tensor)] for name, tensor in tensors.items()}


def _tensor_bytes(*mappings: Tensors) -> int:
    """The bytes of all tensors; shared memory counts once."""
    distinct = {key: tensor for each in mappings for key, tensor in _by_memory(each).items()}
    return sum(tensor.nbytes for tensor in distinct.values())


def _by_memory(tensors: Tensors) -> dict[tuple[int, torch.Size], Tensor]:
    return {_memory(tensor): tensor for tensor in tensors.values()}


def _memory(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape
