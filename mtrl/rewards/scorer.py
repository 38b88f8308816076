"""Responses to rewards: every part by its function, the total by this step's weights."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from mtrl.algorithms.rewards import combine, scheduled_weights
from mtrl.rewards.outcomes import MAX_EXTRAS, TOKEN_WEIGHTS, Outcome, completed, last_words, logged_number
from mtrl.rewards.samples import make_samples, signal_lists
from mtrl.types import Needs, Rewards, Rollouts, Signals
from mtrl.utils.errors import RunError

Schedule = Sequence[tuple[float, Sequence[float]]]
Sample = Mapping[str, Any]
Outcomes = Mapping[str, Sequence[Outcome]]  # by the function's name, one outcome for each row

MODEL = "model"  # the part that a reward model gives
MAX_FAILED_STEPS = 10  # steps in a row without a single scored response, after which a run ends

logger = logging.getLogger(__name__)


class RewardFunction(Protocol):
    """One part of the reward: takes samples, answers when it is ready."""

    needs: Needs  # the signals it reads: with any, it is told what the probes measured, and so runs after them

    def submit(self, samples: Sequence[Sample], group: Sequence[int] | None = None) -> Sequence[Future[Outcome]]:
        """A future for each sample. `group`: the prompt of each, for functions that compare; None: all different."""

    def close(self) -> object: ...


class ResponseScorer(Protocol):
    """Reads the conversations themselves, all of a step at once."""

    def score(self, rollouts: Rollouts) -> Sequence[float | str]:
        """For each response its score, or the reason why it has none."""


class Builtin:
    """A built-in that takes time in proportion to the response, and little of it, so it runs where it is asked: nothing
    has to limit it. Those that can think longer have the sandbox."""

    needs = Needs()

    def __init__(self, function: Callable[[Sample], float | None]) -> None:
        self.function = function

    def submit(self, samples: Sequence[Sample], group: Sequence[int] | None = None) -> list[Future[Outcome]]:
        return [completed(self._outcome(sample)) for sample in samples]

    def _outcome(self, sample: Sample) -> Outcome:
        try:
            return Outcome(self.function(sample))
        except Exception:  # a row with a truth or options that it cannot read
            return Outcome(failure=last_words(traceback.format_exc()))

    def close(self) -> None: ...


def to_outcome(score: float | str) -> Outcome:
    return Outcome(failure=score) if isinstance(score, str) else Outcome(score)


@dataclass
class RewardScorer:
    """`functions` by name, in the order of the weights; the model's weight is the last. `schedule` holds (from which
    part of the run, weights)."""

    functions: Mapping[str, RewardFunction]
    schedule: Schedule
    total_steps: int
    model: ResponseScorer | None = None
    normalize: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    failure_reward: float = 0.0
    options_key: str = "options"
    answer_key: str = "answer"
    wants_token_weights: bool = False  # a function must bring them, since nobody else does
    failed_steps: set[int] = field(default_factory=set)  # the last ones, if they failed on every response
    told_of_missing_weights: bool = False
    extra_names: dict[str, None] = field(default_factory=dict)  # extra values that are logged, in the order they came
    told_of_extras: bool = False
    told_absent: set[str] = field(default_factory=set)  # parts that applied to no response of a step

    def submit(self, rollouts: Rollouts, step: int | None) -> Pending:
        progress = {"global_step": self.total_steps if step is None else step, "max_steps": self.total_steps}
        samples = make_samples(rollouts, self.options_key, self.answer_key, progress)
        group = rollouts.group.tolist()
        asked = {name: f.submit(samples, group) for name, f in self.functions.items() if not f.needs}
        if self.model is not None:  # asked last: the functions run in their processes meanwhile
            asked[MODEL] = [completed(to_outcome(score)) for score in self.model.score(rollouts)]
        return Pending(self, rollouts, step, samples, asked)

    def total(self, parts: Mapping[str, Tensor], group: Tensor, step: int | None) -> Tensor:
        if step is None:  # a validation: the weights of the end, and no normalizing, which would make every mean 0
            return combine(parts, scheduled_weights(1.0, self.schedule), group)
        weights = scheduled_weights(step / max(1, self.total_steps), self.schedule)
        return combine(parts, weights, group, self.normalize)

    def count_failure(self, step: int, all_failed: bool, cause: str) -> None:
        """Stops a run that learns from failure rewards alone. A step that asks again for other prompts counts once."""
        if not all_failed:
            self.failed_steps.clear()
            return
        self.failed_steps.add(step)
        if len(self.failed_steps) >= MAX_FAILED_STEPS:
            raise RunError(f"no response could be scored in {MAX_FAILED_STEPS} steps in a row. The last: {cause}")

    def close(self) -> None:
        for function in self.functions.values():
            function.close()


@dataclass
class Pending:
    """Rewards on their way."""

    scorer: RewardScorer
    rollouts: Rollouts
    step: int | None
    samples: list[dict[str, Any]]
    asked: Mapping[str, Sequence[Future[Outcome]]]  # futures of the functions that need no signals

    def result(self, signals: Signals | None = None) -> Rewards:
        outcomes = self._outcomes(signals)
        parts = {name: torch.tensor([self._value(each) for each in column]) for name, column in outcomes.items()}
        failed = torch.tensor([any(each.failure for each in row) for row in zip(*outcomes.values(), strict=True)])
        causes = [self._cause(name, column) for name, column in outcomes.items() if any(o.failure for o in column)]
        for cause in causes:  # one warning a step and function
            logger.warning("%s", cause)
        if self.step is not None:
            self.scorer.count_failure(self.step, bool(failed.all()), "\n".join(causes))
        self._tell_of_absent(outcomes)
        total = self.scorer.total(parts, self.rollouts.group, self.step)
        self._know_extras(outcomes)
        extras = extra_values(outcomes, self.scorer.extra_names)
        return Rewards(total, parts | extras, failed, token_weights=self._token_weights(outcomes))

    def _outcomes(self, signals: Signals | None) -> Outcomes:
        """All outcomes, in the order of the functions. Those that want signals are asked now."""
        asked, waiting = dict(self.asked), {n: f for n, f in self.scorer.functions.items() if n not in self.asked}
        if waiting:
            measured = signal_lists(self.rollouts, signals)
            samples = [{**s, "signals": m} for s, m in zip(self.samples, measured, strict=True)]
            group = self.rollouts.group.tolist()
            asked |= {name: function.submit(samples, group) for name, function in waiting.items()}
        names = [*self.scorer.functions, *([MODEL] if MODEL in asked else [])]
        return {name: [future.result() for future in asked[name]] for name in names}

    def _value(self, outcome: Outcome) -> float:
        if outcome.failure:
            return self.scorer.failure_reward
        return math.nan if outcome.value is None else outcome.value

    def _cause(self, name: str, column: Sequence[Outcome]) -> str:
        """The first failure in full, and how many there were."""
        rows = [row for row, outcome in enumerate(column) if outcome.failure]
        first = column[rows[0]]
        prompt = self.rollouts.prompts[int(self.rollouts.group[rows[0]])]
        said = f"\nIt printed: {first.output.strip()}" if first.output.strip() else ""
        return (
            f"reward function {name} failed on {len(rows)} of {len(column)} responses, which get failure_reward="
            f"{self.scorer.failure_reward:g}. The first, {prompt.task.origin}: {first.failure}{said}"
        )

    def _tell_of_absent(self, outcomes: Outcomes) -> None:
        """Warns of a part that applies to no response, and so changes no total. Most often the answers stand in another
        column."""
        absent = {name for name, column in outcomes.items() if all(o.value is None and not o.failure for o in column)}
        when = "at validation" if self.step is None else f"at step {self.step + 1}"
        why = ""
        if all(sample["ground_truth"] is None for sample in self.samples):
            why = f"; their rows have no answer in the column {self.scorer.answer_key!r} (dataset.answer_key)"
        for name in sorted(absent - self.scorer.told_absent):
            logger.warning("%s reward %s applies to none of %d responses and is left out%s (this is said once)",
                           when, name, len(self.samples), why)  # fmt: skip
        self.scorer.told_absent |= absent

    def _know_extras(self, outcomes: Outcomes) -> None:
        """Admits the names of new extra values while a run has few. A function that makes up names would fill tables
        and disks."""
        known = self.scorer.extra_names
        found = dict.fromkeys(name for column in outcomes.values() for outcome in column for name in outcome.extras)
        new = [name for name in found if name not in known and name not in outcomes and name != TOKEN_WEIGHTS]
        known |= dict.fromkeys(new[: max(0, MAX_EXTRAS - len(known))])
        if not self.scorer.told_of_extras and any(name not in known for name in new):
            self.scorer.told_of_extras = True
            logger.warning("the reward functions return more than %d different extra values; the first %d are logged, "
                           "no others (this is said once)", MAX_EXTRAS, MAX_EXTRAS)  # fmt: skip

    def _token_weights(self, outcomes: Outcomes) -> Tensor | None:
        """The token weights of the first function that returns some. Rows that it left out, or failed on, get ones."""
        brought = {name: [outcome.extras.get(TOKEN_WEIGHTS) for outcome in column] for name, column in outcomes.items()}
        name = next((name for name, lists in brought.items() if any(each is not None for each in lists)), None)
        lists = brought[name] if name else [None] * len(self.rollouts)
        missing = sum(each is None for each in lists)
        if missing and (name or self.scorer.wants_token_weights) and not self.scorer.told_of_missing_weights:
            self.scorer.told_of_missing_weights = True
            logger.warning("%s returned no token_weights for %d of %d responses; their tokens get weight 1 (this is "
                           "said once)", name or "the reward functions", missing, len(lists))  # fmt: skip
        return padded_with_ones([each or [] for each in lists], self.rollouts.mask.shape[1]) if name else None


def padded_with_ones(lists: Sequence[Sequence[float]], width: int) -> Tensor:
    """[N, width]: shorter lists go on with 1, longer ones are cut."""
    weights = torch.ones(len(lists), width)
    for row, values in enumerate(lists):
        weights[row, : len(values)] = torch.tensor(values[:width], dtype=torch.float32)
    return weights


def extra_values(outcomes: Outcomes, names: Iterable[str]) -> dict[str, Tensor]:
    """Numbers that functions returned beside their reward, as parts of their own; NaN where a response has none."""
    extras = {}
    for name in names:
        column = [logged_number(outcome.extras.get(name)) for row in outcomes.values() for outcome in row]
        if not all(map(math.isnan, column)):
            per_function = torch.tensor(column).view(len(outcomes), -1)
            extras[name] = per_function.nanmean(0)
    return extras
