"""Builds the dataset, the sampler of prompts and the validation."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtrl.checkpoint.folder_store import list_checkpoints
from mtrl.compose import algorithm
from mtrl.config import Config, ConfigError
from mtrl.config.paths import PYTHON_PREFIX
from mtrl.data import Dataset, DataSettings, DataSource, RowList, Sampler, open_dataset, open_sources
from mtrl.data.arrow import DatasetRows, is_dataset
from mtrl.data.cache import DiskCache
from mtrl.data.columns import inspect_columns
from mtrl.data.hub import use_cache_if_offline
from mtrl.data.workers import worker_count
from mtrl.embedded.embedded_rows import TASKS, embedded_rows
from mtrl.protocols import PromptEncoder
from mtrl.rewards.builtin_names import REWARDS
from mtrl.training.validation import Validation

logger = logging.getLogger(__name__)

BAD_ROWS = "bad_rows.jsonl"
MIN_PROMPTS_AHEAD, BYTES_AHEAD = 64, 2 << 30  # prompts and bytes of pixels that worker processes prepare in advance
EMBEDDED = tuple(f"{name}@" for name in TASKS)  # `zoo@test` is a split of an embedded task

Rows = str | Sequence[Mapping[str, Any]]  # as in dataset.train_files, or Python rows, or a datasets.Dataset
PYTHON_ROWS = "rows given in Python"


def make_data_settings(config: Config) -> DataSettings:
    return algorithm.from_keys(DataSettings, config.dataset)


def open_data_sources(data: Rows, default_split: str) -> list[DataSource]:
    if not isinstance(data, str):
        return [DatasetRows(data, PYTHON_ROWS) if is_dataset(data) else RowList(list(data), PYTHON_ROWS)]
    check_not_from_python("data", data)
    if not data:
        data = f"zoo@{default_split}"
    sources: list[DataSource] = []
    for item in (item.strip() for item in data.split(",")):
        if item.startswith(EMBEDDED):
            sources.append(embedded_rows(item))
        else:
            with use_cache_if_offline(item):
                sources += open_sources(item, DiskCache())
    return sources


def check_not_from_python(what: str, name: str) -> None:
    """The saved configuration of a script's run names Python objects, but does not contain them."""
    if name.startswith(PYTHON_PREFIX):
        raise ConfigError(
            [f"{name} stands for {what} that a script gave to mtrl.Trainer; run it again, or name a file"]
        )


def rewards_needing_answers(config: Config, rewards: Sequence[Callable[..., Any] | str] | None = None) -> list[str]:
    """The built-in rewards of a run that compare with the answer of a row."""
    names = [name for name in rewards or config.reward_functions if isinstance(name, str)]
    return [name for name in names if name in REWARDS and REWARDS[name].truth]


def open_data(
    config: Config,
    data: Rows,
    split: str,
    encoder: PromptEncoder,
    directory: Path | None,
    answer_rewards: Sequence[str] = (),
) -> Dataset:
    return open_dataset(
        open_data_sources(data, split),
        make_data_settings(config),
        encoder,
        bad_rows_path=None if directory is None else directory / BAD_ROWS,
        answer_rewards=answer_rewards,
        resuming=directory is not None and bool(list_checkpoints(directory / "checkpoints")),
    )


def has_videos(config: Config) -> bool:
    """Whether the data files have a column of videos, as far as their first rows show. Python rows may have one."""
    files = [config.dataset.train_files, config.dataset.val_files]
    if any(name.startswith(PYTHON_PREFIX) for name in files):
        return True
    sources = [source for name in files if name for source in open_data_sources(name, "train")]
    seen = [inspect_columns(source, DiskCache()) for source in sources]
    return any(config.dataset.video_key in each.columns or "video_key" in dict(each.usable) for each in seen)


def build_sampler(config: Config, dataset: Dataset, encoder: PromptEncoder, directory: Path) -> Sampler:
    data = config.dataset
    options = prefetch_options(config, dataset, data.rollout_batch_size)
    return Sampler(
        dataset, encoder, shuffle=data.shuffle, seed=data.seed, bad_rows_path=directory / BAD_ROWS, **options
    )


def prefetch_options(config: Config, dataset: Dataset, prompts: int) -> dict[str, Any]:
    """Arguments of the sampler for worker processes, if any: they prepare at least a whole batch in advance."""
    workers = worker_count(config.dataset.dataloader_num_workers, dataset.pixels)
    if not workers:
        return {}
    return {"workers": workers, "prompts_ahead": max(MIN_PROMPTS_AHEAD, prompts), "bytes_ahead": BYTES_AHEAD}


def warn_about_few_rows(rows: int, prompts_per_step: int) -> None:
    if rows < prompts_per_step:
        logger.warning(
            "%d row%s for dataset.rollout_batch_size=%d: a step uses a row up to %d times; set it and "
            "worker.actor.global_batch_size to %d or less, or add data",
            rows, "s" if rows > 1 else "", prompts_per_step, math.ceil(prompts_per_step / rows), rows,
        )  # fmt: skip


def validation_sampler(
    config: Config,
    encoder: PromptEncoder,
    directory: Path | None = None,
    answer_rewards: Sequence[str] = (),
    data: Rows | None = None,
) -> Sampler:
    """The validation data, not shuffled; `data` replaces that of the configuration."""
    files = config.dataset.val_files if data is None else data
    dataset = open_data(config, files, "validation", encoder, directory, answer_rewards)
    return Sampler(dataset, encoder, shuffle=False, **prefetch_options(config, dataset, config.dataset.val_batch_size))


def build_validation(
    config: Config,
    encoder: PromptEncoder,
    directory: Path | None,
    trained_on_rows: bool = False,
    answer_rewards: Sequence[str] = (),
    data: Rows | None = None,
) -> Validation | None:
    """None if there is no validation data. The embedded task has its own."""
    embedded = not config.dataset.train_files and not trained_on_rows
    if not config.dataset.val_files and data is None and not embedded:
        return None
    sampler = validation_sampler(config, encoder, directory, answer_rewards, data)
    return Validation(
        batches=lambda: sampler.one_pass(config.dataset.val_batch_size),
        sampling=algorithm.make_validation_sampling(config),
        keep_samples=config.training.val_generations_to_log,
        best_metric=config.training.best_metric,
        prompts=len(sampler.dataset),
    )
