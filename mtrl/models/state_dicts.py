"""The weights of a model: for an engine, a checkpoint or an export, and loaded from disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from mtrl.models.adapters import MergedWeights, adapter_tensors, has_adapters, read_adapters, save_adapters
from mtrl.models.checkpoint_files import WEIGHTS, is_adapter
from mtrl.models.load_model import from_pretrained
from mtrl.models.parallel.fsdp import distribute_from_rank0, full_tensor, is_sharded, unsharded_class
from mtrl.models.parallel.ranks import SINGLE_PROCESS, Ranks
from mtrl.models.value_head import HEAD, OUTPUT_MATRIX, attach_head, find_head, has_head

Form = tuple[torch.dtype, tuple[int, ...]]  # of a tensor: dtype and shape


def exported_weights(model: PreTrainedModel) -> Mapping[str, Tensor]:
    """Every weight by its Hugging Face name, tied weights under each of their names: published and saved weights come
    from here, so they cannot differ. The tensors are the model's own and follow its updates. Weights merged with
    adapters or sharded over ranks are made on access; of a sharded model all ranks must access them in the same order.
    A value head has its name in checkpoints.
    """
    if has_adapters(model):
        return MergedWeights(model)
    weights: dict[str, Tensor] = model.state_dict()
    if has_head(model):
        weights[HEAD] = weights.pop(OUTPUT_MATRIX)
    return GatheredWeights(weights) if is_sharded(model) else weights


def weight_forms(weights: Mapping[str, Tensor]) -> dict[str, Form]:
    """Dtype and shape of each weight, in order. Weights that are made on access have a method for it, which makes
    none."""

    def form_of(name: str) -> Form:
        return weights[name].dtype, tuple(weights[name].shape)

    form: Callable[[str], Form] = getattr(weights, "form", form_of)
    return {name: form(name) for name in weights}


class GatheredWeights(Mapping[str, Tensor]):
    """Weights sharded over ranks; each is gathered on access."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> Tensor:
        return full_tensor(self._weights[name])

    def count_bytes(self, name: str) -> int:
        """Bytes of the full tensor, without gathering it."""
        weight = self._weights[name]
        return weight.numel() * weight.element_size()

    def form(self, name: str) -> Form:
        weight = self._weights[name]
        return weight.dtype, tuple(weight.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def checkpoint_weights(model: PreTrainedModel) -> Mapping[str, Tensor]:
    """The weights in a checkpoint: all of them, or only the adapters if there are any."""
    return adapter_tensors(model) if has_adapters(model) else exported_weights(model)


def save_model(
    model: PreTrainedModel,
    weights: Mapping[str, Tensor],
    directory: Path,
    *,
    shard: str = "50GB",
    progress: bool = False,
) -> None:
    """Write a checkpoint that `from_pretrained` loads: the model's config, and `weights`, which were exported from it
    and may be older than its current ones. Adapters are written as peft files. `shard`: the largest weight file."""
    if not progress:
        disable_progress_bar()  # a bar for the shards would interfere with the progress of the training
    if has_adapters(model):
        save_adapters(model, weights, directory)
    else:
        model.save_pretrained(directory, state_dict=dict(weights), max_shard_size=shard)


def map_file_names(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, str] | None:
    """Each weight's name in the files of `save_model`, one for tied weights; found by writing a number in place of each
    weight. None if a checkpoint does not hold the weights one by one."""
    first: dict[int, str] = {}
    tied = {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    names = list(weights)
    marks = {name: torch.tensor([number]) for number, name in enumerate(names)}
    with TemporaryDirectory() as folder:
        try:
            save_model(model, {name: marks[tied.get(name, name)] for name in names}, Path(folder))
        except (RuntimeError, ValueError, IndexError):  # transformers joins some tensors, and these have no shape
            return None
        written = load_file(Path(folder) / WEIGHTS)
    distinct = {tied.get(name, name) for name in names}
    one_by_one = len(written) == len(distinct) and all(mark.shape == (1,) for mark in written.values())
    return {names[int(mark)]: name for name, mark in written.items()} if one_by_one else None


def save_config(model: PreTrainedModel, directory: Path) -> None:
    """Write the files of `save_model` except the weights. `save_model` itself would remove weight files of others."""
    with TemporaryDirectory(dir=directory) as folder:
        save_model(model, {}, Path(folder))
        for file in Path(folder).iterdir():
            if file.name != WEIGHTS:
                file.rename(directory / file.name)


def load_weights(model: PreTrainedModel, directory: Path, ranks: Ranks = SINGLE_PROCESS) -> None:
    """Load, in place, what `save_model` wrote for the same model; missing or unknown weights are an error. If ranks
    hold a model together, only the first reads."""
    try:
        saved = ranks.rank0_only(lambda: _read_checkpoint(model, directory))
        targets = adapter_tensors(model) if has_adapters(model) else model.state_dict()
        distribute_from_rank0(targets, saved, ranks)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{directory} holds another model than this run's: {error}") from error


def _read_checkpoint(model: PreTrainedModel, directory: Path) -> Mapping[str, Tensor]:
    """The tensors of a checkpoint, checked to have the model's names and shapes: adapters, or its state dict."""
    if has_adapters(model):
        return read_adapters(model, directory)
    if is_adapter(directory):
        raise ValueError("it holds adapters (worker.actor.model.peft_type)")
    replaced = {HEAD, OUTPUT_MATRIX} if has_head(model) else set()  # the head replaces the output matrix
    saved, report = from_pretrained(unsharded_class(model), str(directory), dtype=model.dtype)
    wrong = {problem: sorted(set(map(str, names)) - replaced) for problem, names in report.items()}
    if any(wrong.values()):
        raise ValueError(str({problem: names for problem, names in wrong.items() if names}))
    if has_head(model) and (head := find_head(str(directory))) is not None:
        saved = attach_head(saved, head)
    read: dict[str, Tensor] = saved.state_dict()
    own, theirs = ({name: tensor.shape for name, tensor in each.items()} for each in (model.state_dict(), read))
    if other := sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name)):
        raise ValueError(f"weights of other names or sizes ({', '.join(other[:3])})")
    return read
