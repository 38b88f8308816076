"""Validation by generator and scorer, and a prober if attention is read: avg@k, pass@k, and success by data column."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mtrl.algorithms.groups import group_mean
from mtrl.algorithms.metrics import attention_values, success_part, tool_values
from mtrl.protocols import Generator, Prober, Scorer
from mtrl.types import Needs, Prompt, Rewards, Rollouts, Sampling, Signals, ValidationSample

logger = logging.getLogger(__name__)

MAX_VALUES = 20  # columns with more distinct values are no categories

OnBatch = Callable[[Rollouts, Rewards], None]  # called with each batch of a validation


@dataclass(frozen=True)
class Result:
    """One validation. `by` holds, for each category of each column, the mean success of its prompts."""

    metrics: dict[str, float]
    by: dict[str, dict[str, float]] = field(default_factory=dict)
    samples: tuple[ValidationSample, ...] = ()
    score: float | None = None  # decides the best model


@dataclass(frozen=True)
class Validation:
    """`batches` returns all validation prompts in batches."""

    batches: Callable[[], Iterable[Sequence[Prompt]]]
    sampling: Sampling
    keep_samples: int = 4
    best_metric: str | None = None  # higher is better; None: no best model is kept
    prompts: int = 0  # how many there are, for progress bars

    def run(
        self,
        generator: Generator,
        scorer: Scorer,
        version: int,
        prober: Prober | None = None,
        on_batch: OnBatch = lambda rollouts, rewards: None,
    ) -> Result:
        """Sample and score all prompts. With a prober, attention is read for metrics and rewards."""
        scores: dict[str, list[float]] = defaultdict(list)
        solved: list[tuple[Mapping[str, Any], float, float]] = []  # columns, mean and best success of each prompt
        samples: list[ValidationSample] = []
        begin = time.perf_counter()
        for prompts in self.batches():
            with generator.resident():
                rollouts = generator.generate(prompts, replace(self.sampling, version=version))
            pending = scorer.submit(rollouts, step=None)
            signals = Signals() if prober is None else prober.probe(rollouts, Needs("attention_mass"), step=None)
            rewards = pending.result(signals)
            add_scores(scores, rollouts, rewards, signals)
            solved += self._solved(rollouts, rewards)
            samples += shown_samples(rollouts, rewards, self.keep_samples - len(samples))
            on_batch(rollouts, rewards)
        metrics = {f"val/{name}": sum(values) / len(values) for name, values in scores.items() if values}
        if solved:
            k = self.sampling.n
            metrics[f"val/avg@{k}"] = sum(mean for _, mean, _ in solved) / len(solved)
            metrics[f"val/pass@{k}"] = sum(best for _, _, best in solved) / len(solved)
        metrics["perf/seconds_validation"] = time.perf_counter() - begin
        by = by_column([(columns, mean) for columns, mean, _ in solved])
        return Result(metrics, by, tuple(samples), self._score(metrics))

    def _score(self, metrics: Mapping[str, float]) -> float | None:
        if self.best_metric is None:
            return None
        if self.best_metric not in metrics:
            problem = f"no {self.best_metric!r} among {', '.join(metrics)}"
            logger.warning("training.best_metric: %s; no best model is chosen", problem)
        return metrics.get(self.best_metric)

    def _solved(self, rollouts: Rollouts, rewards: Rewards) -> list[tuple[Mapping[str, Any], float, float]]:
        part = success_part(rewards.parts)
        if part is None:
            return []
        right = (part >= 1).float().where(~part.isnan(), torch.nan)
        means = group_mean(right, rollouts.group).tolist()
        return [
            (prompt.task.columns or {}, mean, float(mean > 0))
            for prompt, mean in zip(rollouts.prompts, means, strict=True)
            if mean == mean
        ]


def shown_samples(rollouts: Rollouts, rewards: Rewards, count: int) -> list[ValidationSample]:
    """The first response to each of the first `count` prompts."""
    firsts: dict[int, int] = {}
    for row, g in enumerate(rollouts.group.tolist()):
        firsts.setdefault(g, row)
    chosen = list(firsts.items())[: max(0, count)]
    samples = []
    for g, row in chosen:
        task, parts = rollouts.prompts[g].task, {name: part[row].item() for name, part in rewards.parts.items()}
        applying = {name: value for name, value in parts.items() if value == value}
        total = rewards.total[row].item()
        samples.append(ValidationSample(task.id, task.text, rollouts.text[row], task.answer, total, applying))
    return samples


def add_scores(scores: dict[str, list[float]], rollouts: Rollouts, rewards: Rewards, signals: Signals) -> None:
    scores["reward_score"] += rewards.total.tolist()
    scores["response_length"] += rollouts.mask.sum(1).tolist()
    scores["truncated"] += rollouts.truncated.float().tolist()
    scores["reward/failed"] += rewards.failed.float().tolist()
    for name, part in rewards.parts.items():
        scores[f"reward/{name}"] += part[~part.isnan()].tolist()
    for name, numbers in tool_values(rollouts).items():
        scores[name] += numbers
    for name, values in attention_values(signals, rollouts).items():
        scores[f"attention/{name}"] += values[~values.isnan()].tolist()


def by_column(solved: Sequence[tuple[Mapping[str, Any], float]]) -> dict[str, dict[str, float]]:
    """Mean success by value, for every column that looks like a category: few values, short texts or numbers."""
    tables: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for columns, success in solved:
        for name, value in columns.items():
            if isinstance(value, (str, int)) and len(str(value)) <= 40:
                tables[name][str(value)].append(success)
    return {
        name: {value: sum(rates) / len(rates) for value, rates in sorted(table.items())}
        for name, table in tables.items()
        if 1 < len(table) <= MAX_VALUES and sum(map(len, table.values())) == len(solved)
    }
