"""`mtrl data`: a dataset as the model will see it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mtrl.build.data import EMBEDDED, data_settings, sources_of
from mtrl.build.model import build_encoder
from mtrl.commands.arguments import started
from mtrl.config import ConfigError, load_config, take_file
from mtrl.data import DataError, DataSettings, report
from mtrl.data.sources import Source
from mtrl.models.families import TextEncoder
from mtrl.zoo.rows import CONFIG_FILE


def run(arguments: Sequence[str]) -> int:
    file, overrides = take_file(arguments)
    if not file:
        raise ConfigError(["which data? mtrl data FILE [a.b=c ...]"])
    embedded = file.startswith(EMBEDDED)
    config = load_config(CONFIG_FILE if embedded else None, overrides)
    knows_model = embedded or config.worker.actor.model.model_path is not None
    encoder = started(build_encoder, config) if knows_model else None
    sources = started(sources_of, file, "train")
    return started(show, file, sources, data_settings(config), encoder)


def show(name: str, sources: Sequence[Source], settings: DataSettings, encoder: TextEncoder | None) -> int:
    if not any(map(len, sources)):
        raise DataError(f"{name} holds no row")
    return report.run(sources, settings, encoder, sys.stdout)
