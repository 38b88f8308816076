"""Builds the trackers of metrics and rollouts, and the checkpoint store."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mtrl.checkpoint.folder_store import FolderStore
from mtrl.checkpoint.run_directory import RunDirectory
from mtrl.compose import algorithm
from mtrl.config import Config
from mtrl.config.load_config import to_dict
from mtrl.config.tree import GROUP_ESTIMATORS, LOGGERS
from mtrl.models.families import TextEncoder
from mtrl.protocols import Tracker
from mtrl.tracking.alerts import RunAlerts
from mtrl.tracking.blocks import RECORD_DIR
from mtrl.tracking.console import Console, ConsoleSettings
from mtrl.tracking.curve import CurveFile
from mtrl.tracking.feed import LoggerFeed, RunInfo
from mtrl.tracking.markdown import LogPaths, MarkdownLogs
from mtrl.tracking.notebook import NotebookProgress, display_in_cell, find_shell
from mtrl.tracking.record import RolloutRecord
from mtrl.tracking.run_files import RunFiles, first_steps, read_history, read_validations
from mtrl.tracking.sinks import SINKS, flatten
from mtrl.utils.plugin_registry import Registry
from mtrl.utils.terminal import separate_log

OWN_LOGGERS = Registry[Tracker]("logger", (Tracker,), {}, frozen=False)


def build_trackers(config: Config, steps: int, encoder: TextEncoder, directory: Path, done: int = 0) -> list[Tracker]:
    """`done`: the steps of earlier attempts that this one continues from."""
    training = config.training
    grouped = config.estimator_name in GROUP_ESTIMATORS
    logs = LogPaths.make(directory / "logs", training.rollout_log_path, training.attention_diag_log_path)
    files = RunFiles(directory, training.realtime_rollout_logging, decode=encoder.decode)
    trackers: list[Tracker] = [
        files,
        MarkdownLogs(logs, encoder.decode_tokens, training.realtime_rollout_logging, decode_text=encoder.decode),
        RunAlerts(first_steps(directory), groups=grouped),
        CurveFile(directory),
    ]
    if training.record_rollouts_per_step:
        trackers.append(build_record(config, encoder, directory, files.attempt))
    settings = flatten(to_dict(config))
    run = RunInfo(training.project_name, training.experiment_name, directory, settings, first_step=done + 1)
    names = [spec for spec in training.logger if isinstance(spec, str)]
    trackers += [LoggerFeed(name, partial(SINKS[name], run), encoder.decode) for name in names if name in SINKS]
    offered = {"run_dir": directory, "steps": steps, "first_step": done + 1}
    for spec in training.logger:
        if spec not in LOGGERS:
            trackers.append(algorithm.make_named(OWN_LOGGERS, "training.logger", spec, offered, training))
    if "console" in names and (shell := find_shell()) is not None:
        show, rows = display_in_cell(shell), read_history(directory)
        trackers.append(NotebookProgress(training.experiment_name, steps, training.val_freq, show, rows))
    elif "console" in names:
        console = algorithm.from_keys(ConsoleSettings, training, directory=directory)
        earlier, decode = read_validations(directory), encoder.decode_tokens
        trackers.append(Console(steps, console, earlier=earlier, decode=decode, log=separate_log()))
    return trackers


def build_record(config: Config, encoder: TextEncoder, directory: Path, attempt: int) -> RolloutRecord:
    training, images = config.training, encoder.image_settings
    return RolloutRecord(
        directory / RECORD_DIR,
        encoder.decode_tokens,
        encoder.decode,
        algorithm.make_perturbation(config, images.patch_size if images else 1).view,
        attempt=attempt,
        per_step=training.record_rollouts_per_step,
        limit_bytes=int(training.record_limit_gib * 2**30),
        token_size=(images.temporal_patch_size, images.factor) if images else (1, 1),
        pictures=encoder.pictures,
    )


def build_store(config: Config, directory: RunDirectory) -> FolderStore:
    training = config.training
    return FolderStore(
        directory.path / "checkpoints",
        training.save_limit,
        training.best_metric,
        before_saving=directory.recreate_if_removed,
    )
