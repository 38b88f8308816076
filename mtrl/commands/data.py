"""`mtrl data`: a dataset as the model will see it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mtrl.commands.load_arguments import say, started
from mtrl.compose.policy import build_encoder, unmade
from mtrl.compose.task_source import data_settings, data_sources, rewards_of_truth
from mtrl.config import Config, ConfigError, load_config, take_file
from mtrl.config.packaged import is_config
from mtrl.data import DataError, DataSettings
from mtrl.data.sources import DataSource
from mtrl.embedded.embedded_rows import packaged_config
from mtrl.models.families import TextEncoder
from mtrl.report import data_page as report


def run(arguments: Sequence[str]) -> int:
    file, overrides = take_file(arguments)
    if not file:
        raise ConfigError(["which data? mtrl data FILE|RUN.yaml [a.b=c ...]"])
    if is_config(file):
        return run_config(load_config(file, overrides))
    embedded = packaged_config(file)
    config = load_config(embedded, overrides)
    knows_model = (embedded is not None or config.worker.actor.model.model_path is not None) and not unmade(config)
    encoder = started(build_encoder, config) if knows_model else None
    sources = started(data_sources, file, "train")
    return started(show, file, sources, data_settings(config), encoder)


def run_config(config: Config) -> int:
    """The data of a configuration, through its template and its model's tokenizer."""
    try:
        encoder = build_encoder(config)
    except (OSError, ValueError) as error:
        say(f"note: the tokenizer is not at hand, so prompts are not measured ({str(error).splitlines()[0]})")
        encoder = None
    settings, truth_for, status = data_settings(config), rewards_of_truth(config), 0
    for key, split in (("train_files", "train"), ("val_files", "validation")):
        data = getattr(config.dataset, key)
        if data or split == "train":
            print(f"dataset.{key}: {data or 'the embedded task'}\n", flush=True)
            sources = started(data_sources, data, split)
            status = max(status, started(show, data, sources, settings, encoder, truth_for))
    return status


def show(
    name: str,
    sources: Sequence[DataSource],
    settings: DataSettings,
    encoder: TextEncoder | None,
    truth_for: Sequence[str] = (),
) -> int:
    if not any(map(len, sources)):
        raise DataError(f"{name} holds no row")
    return report.run(sources, settings, encoder, sys.stdout, truth_for=truth_for)
