"""Responses to rewards: every part by its function, the total by this step's weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from mtrl.algorithms.rewards import combine, scheduled_weights
from mtrl.rewards.samples import samples_of
from mtrl.rewards.sandbox import Outcome
from mtrl.types import Rewards, Rollouts

Schedule = Sequence[tuple[float, Sequence[float]]]

logger = logging.getLogger(__name__)


class RewardFunction(Protocol):
    """One part of the reward: takes samples, answers when it is ready."""

    def submit(self, sample: Mapping[str, Any]) -> Future[Outcome]: ...

    def close(self) -> object: ...


class Builtin:
    """A built-in: quick and trusted, so it runs where it is asked."""

    def __init__(self, function: Callable[[Mapping[str, Any]], float | None]) -> None:
        self.function = function

    def submit(self, sample: Mapping[str, Any]) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        future.set_result(Outcome(self.function(sample)))
        return future

    def close(self) -> None: ...


@dataclass
class RewardScorer:
    """`functions` by name, in the order of the weights. `schedule` holds (from which part of the run, weights)."""

    functions: Mapping[str, RewardFunction]
    schedule: Schedule
    total_steps: int
    normalize: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    failure_reward: float = 0.0
    options_key: str = "options"

    def submit(self, rollouts: Rollouts, step: int | None) -> Pending:
        samples = samples_of(rollouts, self.options_key)
        asked = {name: [f.submit(sample) for sample in samples] for name, f in self.functions.items()}
        return Pending(self, rollouts, step, asked)

    def total(self, parts: Mapping[str, torch.Tensor], group: torch.Tensor, step: int | None) -> torch.Tensor:
        if step is None:  # a validation: the weights of the end, and no normalizing, which would make every mean 0
            return combine(parts, scheduled_weights(1.0, self.schedule), group)
        weights = scheduled_weights(step / max(1, self.total_steps), self.schedule)
        return combine(parts, weights, group, self.normalize)

    def close(self) -> None:
        for function in self.functions.values():
            function.close()


@dataclass
class Pending:
    """Rewards on their way."""

    scorer: RewardScorer
    rollouts: Rollouts
    step: int | None
    asked: Mapping[str, list[Future[Outcome]]]

    def result(self) -> Rewards:
        outcomes = {name: [future.result() for future in futures] for name, futures in self.asked.items()}
        parts = {name: torch.tensor([self._value(each) for each in column]) for name, column in outcomes.items()}
        failed = torch.tensor([any(each.failure for each in row) for row in zip(*outcomes.values(), strict=True)])
        self._report(outcomes)
        total = self.scorer.total(parts, self.rollouts.group, self.step)
        return Rewards(total, parts | extra_values(outcomes), failed)

    def _value(self, outcome: Outcome) -> float:
        if outcome.failure:
            return self.scorer.failure_reward
        return math.nan if outcome.value is None else outcome.value

    def _report(self, outcomes: Mapping[str, list[Outcome]]) -> None:
        """One warning a step and function: the first failure in full, and how many there were."""
        for name, column in outcomes.items():
            rows = [row for row, outcome in enumerate(column) if outcome.failure]
            if rows:
                prompt = self.rollouts.prompts[int(self.rollouts.group[rows[0]])]
                logger.warning(
                    "reward function %s failed on %d of %d responses, which get failure_reward=%g. The first, %s: %s",
                    name, len(rows), len(column), self.scorer.failure_reward, prompt.task.origin,
                    column[rows[0]].failure,
                )  # fmt: skip


def extra_values(outcomes: Mapping[str, list[Outcome]]) -> dict[str, torch.Tensor]:
    """Numbers that functions returned beside their reward, as parts of their own; NaN where a response has none."""
    names = {key: None for column in outcomes.values() for outcome in column for key in outcome.extras}
    extras = {}
    for name in names:
        column = [_number(outcome.extras.get(name)) for row in outcomes.values() for outcome in row]
        if not all(map(math.isnan, column)) and name not in outcomes:
            per_function = torch.tensor(column).view(len(outcomes), -1)
            extras[name] = per_function.nanmean(0)
    return extras


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan
