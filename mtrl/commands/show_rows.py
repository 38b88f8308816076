"""Some rows of a configuration's data on the way that training takes them: `mtrl doctor` tells where that fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from mtrl.compose.policy import build_encoder, model_path
from mtrl.compose.task_source import EMBEDDED, data_settings, data_sources, rewards_of_truth
from mtrl.config import Config
from mtrl.data.sample_rows import try_rows

Say = Callable[[str], None]


def row_problems(config: Config, model_seen: bool, note: Say) -> Iterator[str]:
    """Rows that are on this machine go all the way to tokens; where the model was not seen, to messages alone."""
    encoder = None
    if model_seen:
        try:
            encoder = build_encoder(config)
        except (OSError, ValueError) as error:
            place = config.worker.actor.model.tokenizer_path or model_path(config)
            told = str(error).splitlines()[0]
            yield told if place in told else f"the tokenizer of {place} cannot be loaded: {told}"
    data = config.dataset
    for split, names in (("train", data.train_files or "zoo@train"), ("validation", data.val_files)):
        here = local_data(names)
        if not here:
            continue
        try:
            tried = try_rows(
                data_sources(",".join(here), split), data_settings(config), encoder, rewards_of_truth(config)
            )
        except ValueError as error:  # it names the file
            yield str(error)
            continue
        note(f"{tried.rows} rows of {split} tried, {'as messages' if encoder is None else 'up to their tokens'}")
        for line in tried.notes:
            note(line)
        yield from tried.problems


def local_data(names: str) -> list[str]:
    """What can be opened without a download: files, directories and splits of the embedded tasks."""
    items = [item for item in map(str.strip, names.split(",")) if item]
    paths = {item: item if os.path.exists(item) else item.rpartition("@")[0] or item for item in items}
    return [item for item in items if item.startswith(EMBEDDED) or os.path.exists(os.path.expanduser(paths[item]))]
