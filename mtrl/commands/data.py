"""Show a dataset as the model will see it.

mtrl data FILE|RUN.yaml [a.b=c ...]

Prints counts, lengths, image sizes, columns, bad rows, three samples, and how many prompts the length limit drops. FILE
is a file, a directory, a hub id[@split] or zoo@train; token counts need worker.actor.model.model_path=MODEL. For a
configuration it shows its data, through its template and its model's tokenizer, and what its rewards miss in them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mtrl.commands.load_arguments import check_call, log_line
from mtrl.compose.policy import build_encoder, missing_model_hint
from mtrl.compose.task_source import make_data_settings, open_data_sources, rewards_needing_answers
from mtrl.config import Config, load_config, take_file
from mtrl.config.packaged import is_config
from mtrl.data import DataError, DataSettings, DataSource
from mtrl.embedded.embedded_rows import packaged_config
from mtrl.models.families import TextEncoder
from mtrl.report import data_page
from mtrl.utils.errors import StartError


def run(arguments: Sequence[str]) -> int:
    file, overrides = take_file(arguments)
    if not file:
        raise StartError("which data? mtrl data FILE|RUN.yaml [a.b=c ...]")
    if is_config(file):
        return show_config_data(load_config(file, overrides))
    embedded = packaged_config(file)
    config = load_config(embedded, overrides)
    names_model = embedded is not None or config.worker.actor.model.model_path is not None
    hint = missing_model_hint(config) if names_model else None
    if hint:
        log_line(f"note: prompts are not measured, since {hint}")
    encoder = check_call(build_encoder, config) if names_model and not hint else None
    sources = check_call(open_data_sources, file, "train")
    return check_call(show, file, sources, make_data_settings(config), encoder)


def show_config_data(config: Config) -> int:
    try:
        encoder = build_encoder(config)
    except (OSError, ValueError) as error:
        log_line(f"note: the tokenizer cannot be loaded, so prompts are not measured ({str(error).splitlines()[0]})")
        encoder = None
    settings, needing_answers, status = make_data_settings(config), rewards_needing_answers(config), 0
    for key, split in (("train_files", "train"), ("val_files", "validation")):
        data = getattr(config.dataset, key)
        if data or split == "train":
            print(f"dataset.{key}: {data or 'the embedded task'}\n", flush=True)
            sources = check_call(open_data_sources, data, split)
            status = max(status, check_call(show, data, sources, settings, encoder, needing_answers))
    return status


def show(
    name: str,
    sources: Sequence[DataSource],
    settings: DataSettings,
    encoder: TextEncoder | None,
    needing_answers: Sequence[str] = (),
) -> int:
    if not any(map(len, sources)):
        raise DataError(f"{name} holds no row")
    return data_page.run(sources, settings, encoder, sys.stdout, answer_rewards=needing_answers)
