"""The weights of a model on their way out, to an engine, a checkpoint or an export, and back from a disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def exported_weights(model: PreTrainedModel) -> Mapping[str, Tensor]:
    """Every weight by its Hugging Face name, tied ones under each of theirs: what is published and what is saved come
    from here alone, so that they cannot differ. The tensors are the model's own and follow its updates. Weights that
    a model does not hold as plain tensors (shards to gather) are to be made in here, as adapters are merged: by a
    mapping that makes each when it is asked for."""
    return MergedWeights(model) if has_adapters(model) else model.state_dict()


def saved_weights(model: PreTrainedModel) -> Mapping[str, Tensor]:
    """What a checkpoint holds: all weights, or the adapters alone where they are what learns."""
    return adapter_tensors(model) if has_adapters(model) else exported_weights(model)


def save_model(model: PreTrainedModel, weights: Mapping[str, Tensor], directory: Path) -> None:
    """Writes a checkpoint that `from_pretrained` loads as it is: the model's settings, and `weights`, which were
    exported from it and may be older than what it holds now. Of adapters: files of peft."""
    disable_progress_bar()  # a bar for the shards would run through the progress of the training
    if has_adapters(model):
        save_adapters(model, weights, directory)
    else:
        model.save_pretrained(directory, state_dict=dict(weights))


def load_weights(model: PreTrainedModel, directory: Path) -> None:
    """Takes over, in place, what `save_model` wrote of the same model; anything missing or left over is an error."""
    family: Any = type(model)
    try:
        if has_adapters(model):
            load_adapters(model, directory)
            return
        if is_adapter(directory):
            raise ValueError("it holds adapters (worker.actor.model.peft_type)")
        saved, found = family.from_pretrained(directory, dtype=model.dtype, output_loading_info=True)
        if wrong := {problem: sorted(map(str, names)) for problem, names in found.items() if names}:
            raise ValueError(str(wrong))
        model.load_state_dict(saved.state_dict())
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{directory} holds another model than this run's: {error}") from error
