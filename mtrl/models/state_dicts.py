"""The weights of a model on their way out, to an engine, a checkpoint or an export, and back from a disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from mtrl.models.adapters import (
    MergedWeights,
    adapter_tensors,
    has_adapters,
    is_adapter,
    read_adapters,
    save_adapters,
)
from mtrl.models.checkpoint_files import WEIGHTS
from mtrl.models.load_model import from_pretrained
from mtrl.models.parallel.fsdp import fill, is_split, plain_class, whole
from mtrl.models.parallel.ranks import SINGLE_PROCESS, Ranks
from mtrl.models.value_head import HEAD, OUTPUT_MATRIX, find_head, has_head, with_head


def exported_weights(model: PreTrainedModel) -> Mapping[str, Tensor]:
    """Every weight by its Hugging Face name, tied ones under each of theirs: what is published and what is saved come
    from here alone, so that they cannot differ. The tensors are the model's own and follow its updates. Those that a
    model does not hold as plain tensors, merged with adapters or split over ranks, are made when they are asked for; of
    a model that is split all ranks must ask, in the same order. A value head has the name that it has in checkpoints.
    """
    if has_adapters(model):
        return MergedWeights(model)
    weights: dict[str, Tensor] = model.state_dict()
    if has_head(model):
        weights[HEAD] = weights.pop(OUTPUT_MATRIX)
    return WholeWeights(weights) if is_split(model) else weights


class WholeWeights(Mapping[str, Tensor]):
    """Weights that are split over ranks; each is gathered when it is asked for."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> Tensor:
        return whole(self._weights[name])

    def bytes_of(self, name: str) -> int:
        """Of the whole tensor, which nobody need gather for it."""
        weight = self._weights[name]
        return weight.numel() * weight.element_size()

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def saved_weights(model: PreTrainedModel) -> Mapping[str, Tensor]:
    """What a checkpoint holds: all weights, or the adapters alone where they are what learns."""
    return adapter_tensors(model) if has_adapters(model) else exported_weights(model)


def save_model(
    model: PreTrainedModel,
    weights: Mapping[str, Tensor],
    directory: Path,
    *,
    shard: str = "50GB",
    progress: bool = False,
) -> None:
    """Writes a checkpoint that `from_pretrained` loads as it is: the model's settings, and `weights`, which were
    exported from it and may be older than what it holds now. Of adapters: files of peft. `shard`: the largest file of
    weights."""
    if not progress:
        disable_progress_bar()  # a bar for the shards would run through the progress of the training
    if has_adapters(model):
        save_adapters(model, weights, directory)
    else:
        model.save_pretrained(directory, state_dict=dict(weights), max_shard_size=shard)


def names_in_files(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, str] | None:
    """The name in a checkpoint of each weight that `save_model` writes, of tied ones one; found by writing a number in
    the place of each. None where a checkpoint does not hold them one by one as they are."""
    first: dict[int, str] = {}
    tied = {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    names = list(weights)
    marks = {name: torch.tensor([number]) for number, name in enumerate(names)}
    with TemporaryDirectory() as folder:
        try:
            save_model(model, {name: marks[tied.get(name, name)] for name in names}, Path(folder))
        except (RuntimeError, ValueError, IndexError):  # tensors are joined on their way out, and these have no shape
            return None
        written = load_file(Path(folder) / WEIGHTS)
    distinct = {tied.get(name, name) for name in names}
    alone = len(written) == len(distinct) and all(mark.shape == (1,) for mark in written.values())
    return {names[int(mark)]: name for name, mark in written.items()} if alone else None


def save_settings(model: PreTrainedModel, directory: Path) -> None:
    """All that `save_model` writes beside the weights. It would remove files of weights that others write there."""
    with TemporaryDirectory(dir=directory) as folder:
        save_model(model, {}, Path(folder))
        for file in Path(folder).iterdir():
            if file.name != WEIGHTS:
                file.rename(directory / file.name)


def load_weights(model: PreTrainedModel, directory: Path, ranks: Ranks = SINGLE_PROCESS) -> None:
    """Takes over, in place, what `save_model` wrote of the same model; anything missing or left over is an error. Of
    ranks that hold a model together the first alone reads."""
    try:
        saved = ranks.rank0_only(lambda: _read(model, directory))
        targets = adapter_tensors(model) if has_adapters(model) else model.state_dict()
        fill(targets, saved, ranks)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{directory} holds another model than this run's: {error}") from error


def _read(model: PreTrainedModel, directory: Path) -> Mapping[str, Tensor]:
    """The tensors of a checkpoint, which are the model's in name and shape: adapters, or by the names of its state."""
    if has_adapters(model):
        return read_adapters(model, directory)
    if is_adapter(directory):
        raise ValueError("it holds adapters (worker.actor.model.peft_type)")
    headed = has_head(model)
    replaced = {HEAD, OUTPUT_MATRIX} if headed else set()  # the head stands in the place of the other
    saved, found = from_pretrained(plain_class(model), str(directory), dtype=model.dtype)
    wrong = {problem: sorted(set(map(str, names)) - replaced) for problem, names in found.items()}
    if any(wrong.values()):
        raise ValueError(str({problem: names for problem, names in wrong.items() if names}))
    if headed and (head := find_head(str(directory))) is not None:
        saved = with_head(saved, head)
    read: dict[str, Tensor] = saved.state_dict()
    own, theirs = ({name: tensor.shape for name, tensor in each.items()} for each in (model.state_dict(), read))
    if other := sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name)):
        raise ValueError(f"weights of other names or sizes ({', '.join(other[:3])})")
    return read
