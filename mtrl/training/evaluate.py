"""Validation: generator and scorer only. avg@k, pass@k, and both by a column of the data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mtrl.algorithms.groups import group_mean
from mtrl.protocols import Generator, Scorer
from mtrl.types import Prompt, Rewards, Rollouts, Sampling

MAX_VALUES = 20  # a column with more different values is no category


@dataclass(frozen=True)
class Result:
    """One validation. `by` holds, for each category of each column, the mean success of its prompts."""

    metrics: dict[str, float]
    by: dict[str, dict[str, float]] = field(default_factory=dict)
    samples: tuple[tuple[str, str, float], ...] = ()  # prompt id, response, reward


@dataclass(frozen=True)
class Validation:
    """`batches` gives all validation prompts, some at a time; `success` names the part that is 1 for a right answer."""

    batches: Callable[[], Iterable[Sequence[Prompt]]]
    sampling: Sampling
    success: str = "accuracy"
    keep_samples: int = 4

    def run(self, generator: Generator, scorer: Scorer, version: int) -> Result:
        scores: dict[str, list[float]] = defaultdict(list)
        solved: list[tuple[Mapping[str, Any], float, float]] = []  # columns, mean and best success of each prompt
        samples: list[tuple[str, str, float]] = []
        for prompts in self.batches():
            rollouts = generator.generate(prompts, replace(self.sampling, version=version))
            rewards = scorer.submit(rollouts, step=None).result()
            collect(scores, rollouts, rewards)
            solved += self._solved(rollouts, rewards)
            samples += [
                (rollouts.prompts[g].task.id, text, reward)
                for g, text, reward in zip(rollouts.group.tolist(), rollouts.text, rewards.total.tolist(), strict=True)
            ][: max(0, self.keep_samples - len(samples))]
        metrics = {f"val/{name}": sum(values) / len(values) for name, values in scores.items() if values}
        if solved:
            k = self.sampling.n
            metrics[f"val/avg@{k}"] = sum(mean for _, mean, _ in solved) / len(solved)
            metrics[f"val/pass@{k}"] = sum(best for _, _, best in solved) / len(solved)
        return Result(metrics, by_column([(columns, mean) for columns, mean, _ in solved]), tuple(samples))

    def _solved(self, rollouts: Rollouts, rewards: Rewards) -> list[tuple[Mapping[str, Any], float, float]]:
        part = rewards.parts.get(self.success)
        if part is None or part.isnan().all():
            return []
        right = (part >= 1).float().where(~part.isnan(), torch.nan)
        means = group_mean(right, rollouts.group).tolist()
        return [
            (prompt.task.columns or {}, mean, float(mean > 0))
            for prompt, mean in zip(rollouts.prompts, means, strict=True)
            if mean == mean
        ]


def collect(scores: dict[str, list[float]], rollouts: Rollouts, rewards: Rewards) -> None:
    scores["reward_score"] += rewards.total.tolist()
    scores["response_length"] += rollouts.mask.sum(1).tolist()
    scores["truncated"] += rollouts.truncated.float().tolist()
    for name, part in rewards.parts.items():
        scores[f"reward/{name}"] += part[~part.isnan()].tolist()


def by_column(solved: Sequence[tuple[Mapping[str, Any], float]]) -> dict[str, dict[str, float]]:
    """Mean success for each value of every column that looks like a category: few values, short texts or numbers."""
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
