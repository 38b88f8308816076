"""Some rows of a configuration's data, prepared as in training: `mtrl doctor` reports where that fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from mtrl.compose.policy import build_encoder, model_path
from mtrl.compose.task_source import EMBEDDED, make_data_settings, open_data_sources, rewards_needing_answers
from mtrl.config import Config
from mtrl.data.sample_rows import check_sample_rows


def check_rows(config: Config, is_model_known: bool, note: Callable[[str], None]) -> Iterator[str]:
    """Try rows of local data up to their tokens, or up to their messages if the model is not known."""
    encoder = None
    if is_model_known:
        try:
            encoder = build_encoder(config)
        except (OSError, ValueError) as error:
            path = config.worker.actor.model.tokenizer_path or model_path(config)
            message = str(error).splitlines()[0]
            yield message if path in message else f"the tokenizer of {path} cannot be loaded: {message}"
    data = config.dataset
    for split, names in (("train", data.train_files or "zoo@train"), ("validation", data.val_files)):
        local = select_local_data(names)
        if not local:
            continue
        try:
            sources, settings = open_data_sources(",".join(local), split), make_data_settings(config)
            tried = check_sample_rows(sources, settings, encoder, rewards_needing_answers(config))
        except ValueError as error:  # it names the file
            yield str(error)
            continue
        note(f"{tried.rows} rows of {split} tried, {'as messages' if encoder is None else 'up to their tokens'}")
        for line in tried.notes:
            note(line)
        yield from tried.problems


def select_local_data(names: str) -> list[str]:
    """The data that need no download: files, directories and splits of the embedded tasks."""
    items = [item for item in map(str.strip, names.split(",")) if item]
    paths = {item: item if os.path.exists(item) else item.rpartition("@")[0] or item for item in items}
    return [item for item in items if item.startswith(EMBEDDED) or os.path.exists(os.path.expanduser(paths[item]))]
