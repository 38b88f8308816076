"""The weights of a model on their way out, to an engine, a checkpoint or an export, and back from a disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from mtrl.models.adapters import (
    MergedWeights,
    adapter_tensors,
    has_adapters,
    is_adapter,
    load_adapters,
    save_adapters,
)
from mtrl.models.load import from_pretrained
from mtrl.models.value_head import HEAD, OUTPUT_MATRIX, find_head, has_head, with_head


def exported_weights(model: PreTrainedModel) -> Mapping[str, Tensor]:
    """Every weight by its Hugging Face name, tied ones under each of theirs: what is published and what is saved come
    from here alone, so that they cannot differ. The tensors are the model's own and follow its updates. Weights that
    a model does not hold as plain tensors (shards to gather) are to be made in here, as adapters are merged: by a
    mapping that makes each when it is asked for. A value head has the name that it has in checkpoints."""
    if has_adapters(model):
        return MergedWeights(model)
    weights: dict[str, Tensor] = model.state_dict()
    if has_head(model):
        weights[HEAD] = weights.pop(OUTPUT_MATRIX)
    return weights


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


def load_weights(model: PreTrainedModel, directory: Path) -> None:
    """Takes over, in place, what `save_model` wrote of the same model; anything missing or left over is an error."""
    headed = has_head(model)
    replaced = {HEAD, OUTPUT_MATRIX} if headed else set()  # the head stands in the place of the other
    try:
        if has_adapters(model):
            load_adapters(model, directory)
            return
        if is_adapter(directory):
            raise ValueError("it holds adapters (worker.actor.model.peft_type)")
        saved, found = from_pretrained(type(model), str(directory), dtype=model.dtype)
        wrong = {problem: sorted(set(map(str, names)) - replaced) for problem, names in found.items()}
        if any(wrong.values()):
            raise ValueError(str({problem: names for problem, names in wrong.items() if names}))
        if headed and (head := find_head(str(directory))) is not None:
            saved = with_head(saved, head)
        model.load_state_dict(saved.state_dict())
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{directory} holds another model than this run's: {error}") from error
