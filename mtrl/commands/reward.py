"""Try a reward function on recorded responses, without a model.

mtrl reward FILE --data ROLLOUTS|DATASET [a.b=c ...]

FILE is file.py[:name], package.module:name or a built-in. ROLLOUTS is the rollouts.jsonl of a run, or the run. Of a
DATASET the column `response` is scored, or else the answers. Prints every component, a histogram, the slowest and the
failed responses; worker.reward.reward_fn_kwargs, timeout_s and num_cpus apply here too. The last line is JSON. Exit
status 1: the function failed on every response.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mtrl.commands.load_arguments import OptionParser, check_call, log_line
from mtrl.commands.recorded import DataRecord, RunRecord, find_rollouts_file, iterate_rollouts
from mtrl.compose.policy import build_encoder
from mtrl.compose.reward_scorer import get_builtin_reward, make_reward_function
from mtrl.compose.task_source import EMBEDDED, make_data_settings, open_data_sources
from mtrl.config import Config, load_config
from mtrl.data import DataError, DataSource
from mtrl.data.cache import DiskCache
from mtrl.data.columns import apply_column_aliases
from mtrl.data.prompts import TaskBuilder
from mtrl.embedded.embedded_rows import packaged_config
from mtrl.models.families import TextEncoder
from mtrl.report.reward_page import report, summary
from mtrl.rewards.builtin_names import is_builtin_name
from mtrl.rewards.dry_run import DryRunResult, score_recorded
from mtrl.rewards.samples import make_samples

ALL_FAILED = 1  # exit status: the function gave no response a reward
OPTIONS = OptionParser(__doc__, "--data")


def run(arguments: Sequence[str]) -> int:
    options, function, overrides = OPTIONS.parse_path(arguments, "which reward?")
    if options.data is None:
        OPTIONS.error("--data: name the rollouts.jsonl of a run, or a dataset")
    rollouts = check_call(find_rollouts_file, options.data)
    file = packaged_config(options.data) or (None if rollouts is None else rollouts.parent / "config.yaml")
    config = load_config(file if file and file.is_file() else None, overrides, saved=True)
    trial, notes = check_call(try_reward, config, function, options.data, rollouts)
    for note in notes:
        log_line(f"note: {note}")
    print(report(trial))
    print(json.dumps(summary(trial)))
    return ALL_FAILED if len(trial.failed) == len(trial.responses) else 0


def try_reward(config: Config, function: str, data: str, rollouts: Path | None) -> tuple[DryRunResult, list[str]]:
    """The trial, and notes for the reader of its numbers. `rollouts`: the file, if the data are those of a run."""
    if is_builtin_name(function):
        get_builtin_reward(function)  # reports a wrong name before the data are opened
    notes: list[str] = []
    builder = TaskBuilder.from_settings(make_data_settings(config))
    sources = open_data_sources(data, "train") if rollouts is None else _open_run_data(config, rollouts, notes)
    sources = apply_column_aliases(sources, builder.settings, DiskCache())
    record = DataRecord(sources, builder) if rollouts is None else RunRecord(rollouts, sources, builder)
    encoder = _load_encoder(config, data, rollouts, notes)
    name, part = make_reward_function(config, function)
    if part.needs:
        notes.append("the function asks for signals, which recorded responses do not have: it gets none")
    describe = partial(make_samples, options_key=config.dataset.options_key, answer_key=config.dataset.answer_key)
    try:
        rollout_batches = iterate_rollouts(record.groups(), encoder)
        trial = score_recorded(name, part, rollout_batches, describe, config.worker.reward.failure_reward)
    finally:
        part.close()
    if not trial.responses:
        raise DataError(f"{data} holds no response to try")
    return trial, [*record.notes(), *notes]


def _open_run_data(config: Config, rollouts: Path, notes: list[str]) -> Sequence[DataSource]:
    if not (rollouts.parent / "config.yaml").is_file():
        notes.append(f"there is no config.yaml next to {rollouts} that names the data")
        return ()
    try:
        return open_data_sources(config.dataset.train_files, "train")
    except ValueError as error:
        notes.append(f"the run's data cannot be opened: {error}")
        return ()


def _load_encoder(config: Config, data: str, rollouts: Path | None, notes: list[str]) -> TextEncoder | None:
    """The model's encoder, which gives responses their tokens and images their size; None if no model is known."""
    is_named = config.worker.actor.model.model_path is not None
    has_run_config = rollouts is not None and (rollouts.parent / "config.yaml").is_file()
    try:
        if is_named or has_run_config or data.startswith(EMBEDDED):
            return build_encoder(config)
        reason = "no model is named (worker.actor.model.model_path=MODEL)"
    except ValueError as error:
        reason = f"the run's tokenizer cannot be loaded ({error})"
    notes.append(f"{reason}: response_token_ids is empty, and images have their own size")
    return None
