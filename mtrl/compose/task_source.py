"""Rows, the dataset made of them, and who hands out its prompts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtrl.checkpoint.folder_store import checkpoints
from mtrl.compose import algorithm
from mtrl.compose.hub import seeking_data
from mtrl.config import Config, ConfigError
from mtrl.config.paths import GIVEN
from mtrl.data import Dataset, DataSettings, RowList, Sampler, open_dataset, open_sources
from mtrl.data.arrow import DatasetRows, is_dataset
from mtrl.data.cache import DiskCache
from mtrl.data.columns import seen_columns
from mtrl.data.sources import DataSource
from mtrl.data.workers import worker_count
from mtrl.embedded.embedded_rows import TASKS, embedded_rows
from mtrl.protocols import PromptEncoder
from mtrl.rewards.builtin_names import REWARDS
from mtrl.training.validation import Validation

logger = logging.getLogger(__name__)

BAD_ROWS = "bad_rows.jsonl"
AHEAD, BYTES_AHEAD = 64, 2 << 30  # prompts and bytes of pixels that processes make ahead
EMBEDDED = tuple(f"{name}@" for name in TASKS)  # `zoo@test` names a split of a task, wherever a data file may be named

Rows = str | Sequence[Mapping[str, Any]]  # a file specification, or rows made in Python, or a datasets.Dataset
GIVEN_NAME = "rows given in Python"


def data_settings(config: Config) -> DataSettings:
    """The part of the `dataset:` block that reading rows depends on."""
    names = DataSettings.__dataclass_fields__
    return DataSettings(**{name: getattr(config.dataset, name) for name in names})


def data_sources(data: Rows, default_split: str) -> list[DataSource]:
    if not isinstance(data, str):
        return [DatasetRows(data, GIVEN_NAME) if is_dataset(data) else RowList(list(data), GIVEN_NAME)]
    check_given("data", data)
    if not data:
        data = f"zoo@{default_split}"
    sources: list[DataSource] = []
    for item in (item.strip() for item in data.split(",")):
        if item.startswith(EMBEDDED):
            sources.append(embedded_rows(item))
        else:
            with seeking_data(item):
                sources += open_sources(item, DiskCache())
    return sources


def check_given(what: str, name: str) -> None:
    """A configuration that a script's run has saved names what the script gave, and does not hold it."""
    if name.startswith(GIVEN):
        told = f"{name} stands for {what} that a script gave to mtrl.Trainer"
        raise ConfigError([f"{told}; run that script again, or name a file"])


def rewards_of_truth(config: Config, given: Sequence[Callable[..., Any] | str] | None = None) -> list[str]:
    """The built-in rewards of a run that compare with a row's answer."""
    named = [name for name in given or config.reward_functions if isinstance(name, str)]
    return [name for name in named if name in REWARDS and REWARDS[name].truth]


def open_data(
    config: Config,
    data: Rows,
    split: str,
    encoder: PromptEncoder,
    directory: Path | None,
    truth_for: Sequence[str] = (),
) -> Dataset:
    listed = None if directory is None else directory / BAD_ROWS
    begun = directory is not None and bool(checkpoints(directory / "checkpoints"))
    return open_dataset(
        data_sources(data, split),
        data_settings(config),
        encoder,
        bad_rows_path=listed,
        truth_for=truth_for,
        begun=begun,
    )


def holds_videos(config: Config) -> bool:
    """Whether rows of the run's files have a column of videos, of those rows that are looked at for their columns; of
    rows given in Python nothing is known."""
    files = [config.dataset.train_files, config.dataset.val_files]
    if any(name.startswith(GIVEN) for name in files):
        return True
    sources = [source for name in files if name for source in data_sources(name, "train")]
    seen = [seen_columns(source, DiskCache()) for source in sources]
    return any(config.dataset.video_key in each.columns or "video_key" in dict(each.usable) for each in seen)


def build_sampler(config: Config, dataset: Dataset, encoder: PromptEncoder, directory: Path) -> Sampler:
    shuffle, seed, ahead = config.dataset.shuffle, config.dataset.seed, config.dataset.rollout_batch_size
    options = ahead_of_use(config, dataset, ahead)
    return Sampler(dataset, encoder, shuffle=shuffle, seed=seed, bad_rows_path=directory / BAD_ROWS, **options)


def ahead_of_use(config: Config, dataset: Dataset, prompts: int) -> dict[str, Any]:
    """With which processes prompts are made before they are asked for; with some, a whole batch of them is ahead."""
    workers = worker_count(config.dataset.dataloader_num_workers, dataset.pixels)
    most = {"prompts_ahead": max(AHEAD, prompts), "bytes_ahead": BYTES_AHEAD}
    return {"workers": workers, **most} if workers else {}


def warn_of_few_rows(rows: int, prompts_per_step: int) -> None:
    if rows < prompts_per_step:
        logger.warning(
            "%d row%s for dataset.rollout_batch_size=%d: a step asks a row up to %d times; set it and "
            "worker.actor.global_batch_size to %d or less, or add data",
            rows, "s" if rows > 1 else "", prompts_per_step, math.ceil(prompts_per_step / rows), rows,
        )  # fmt: skip


def validation_sampler(
    config: Config,
    encoder: PromptEncoder,
    directory: Path | None = None,
    truth_for: Sequence[str] = (),
    data: Rows | None = None,
) -> Sampler:
    """The validation data in their own order; `data` stand in for the config's."""
    files = config.dataset.val_files if data is None else data
    dataset = open_data(config, files, "validation", encoder, directory, truth_for)
    return Sampler(dataset, encoder, shuffle=False, **ahead_of_use(config, dataset, config.dataset.val_batch_size))


def build_validation(
    config: Config,
    encoder: PromptEncoder,
    directory: Path | None,
    trained_on_rows: bool = False,
    truth_for: Sequence[str] = (),
    data: Rows | None = None,
) -> Validation | None:
    """None where there is nothing to validate on: the embedded task validates itself, other data only if given."""
    embedded = not config.dataset.train_files and not trained_on_rows
    if not config.dataset.val_files and data is None and not embedded:
        return None
    sampler = validation_sampler(config, encoder, directory, truth_for, data)
    return Validation(
        batches=lambda: sampler.one_pass(config.dataset.val_batch_size),
        sampling=algorithm.validation_sampling(config),
        keep_samples=config.training.val_generations_to_log,
        best_metric=config.training.best_metric,
        prompts=len(sampler.dataset),
    )
