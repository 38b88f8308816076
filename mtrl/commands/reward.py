"""`mtrl reward`: a reward function on recorded responses, without a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mtrl.commands.load_arguments import say, started, take_path_and_data
from mtrl.commands.recorded import DataRecord, Recorded, RunRecord, batches, rollouts_file
from mtrl.compose.policy import build_encoder
from mtrl.compose.reward_scorer import known_reward, reward_function
from mtrl.compose.task_source import EMBEDDED, data_settings, data_sources
from mtrl.config import Config, ConfigError, load_config
from mtrl.data import DataError
from mtrl.data.cache import DiskCache
from mtrl.data.columns import with_known_columns
from mtrl.data.prompts import TaskBuilder
from mtrl.data.sources import DataSource
from mtrl.embedded.embedded_rows import packaged_config
from mtrl.models.families import TextEncoder
from mtrl.report.reward_page import report, summary
from mtrl.rewards.builtin_names import is_bare
from mtrl.rewards.dry_run import Trial, try_on
from mtrl.rewards.samples import make_samples

ALL_FAILED = 1  # exit status: the function gave no response a reward


def run(arguments: Sequence[str]) -> int:
    function, data, overrides = take_path_and_data(arguments, "which reward? mtrl reward FILE --data F [a.b=c ...]")
    if data is None:
        raise ConfigError(["--data: name the rollouts.jsonl of a run, or a dataset"])
    file = started(rollouts_file, data)
    place = packaged_config(data) or (None if file is None else file.parent / "config.yaml")
    config = load_config(place if place and place.is_file() else None, overrides, saved=True)
    trial, notes = started(try_reward, config, function, data, file)
    for note in notes:
        say(f"note: {note}")
    print(report(trial))
    print(json.dumps(summary(trial)))
    return ALL_FAILED if len(trial.failed) == len(trial.tried) else 0


def try_reward(config: Config, function: str, data: str, rollouts: Path | None) -> tuple[Trial, list[str]]:
    """The trial, and what a reader of its numbers must know. `rollouts`: the file, where the data are a run's."""
    if is_bare(function):
        known_reward(function)  # a wrong name is told before the data are opened
    notes: list[str] = []
    builder = TaskBuilder.of(data_settings(config))
    sources = data_sources(data, "train") if rollouts is None else _sources_of_run(config, rollouts, notes)
    sources = with_known_columns(sources, builder.settings, DiskCache())
    record: Recorded = DataRecord(sources, builder) if rollouts is None else RunRecord(rollouts, sources, builder)
    encoder = _encoder(config, data, rollouts, notes)
    name, part = reward_function(config, function)
    if part.needs:
        notes.append("the function asks for signals, and nobody probed these responses: it gets none")
    describe = partial(make_samples, options_key=config.dataset.options_key, answer_key=config.dataset.answer_key)
    try:
        trial = try_on(name, part, batches(record.groups(), encoder), describe, config.worker.reward.failure_reward)
    finally:
        part.close()
    if not trial.tried:
        raise DataError(f"{data} holds no response to try")
    return trial, [*record.notes(), *notes]


def _sources_of_run(config: Config, rollouts: Path, notes: list[str]) -> Sequence[DataSource]:
    if not (rollouts.parent / "config.yaml").is_file():
        notes.append(f"there is no config.yaml beside {rollouts} to say which data they came from")
        return ()
    try:
        return data_sources(config.dataset.train_files, "train")
    except ValueError as error:
        notes.append(f"the run's data cannot be opened: {error}")
        return ()


def _encoder(config: Config, data: str, rollouts: Path | None, notes: list[str]) -> TextEncoder | None:
    """The model's encoder, which gives responses their tokens and images their size; None where no model is known.
    Weights are not read."""
    named = config.worker.actor.model.model_path is not None
    of_run = rollouts is not None and (rollouts.parent / "config.yaml").is_file()
    try:
        if named or of_run or data.startswith(EMBEDDED):
            return build_encoder(config)
        reason = "no model is named (worker.actor.model.model_path=MODEL)"
    except ValueError as error:
        reason = f"the run's tokenizer cannot be loaded ({error})"
    notes.append(f"{reason}: response_token_ids is empty, and images have their own size")
    return None
