"""Score responses: each part by its function, the total by the weights of the step."""

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
from mtrl.rewards.outcomes import MAX_EXTRAS, TOKEN_WEIGHTS, Outcome, completed_future, logged_number
from mtrl.rewards.samples import make_samples, signal_lists
from mtrl.sandbox.plain_text import sanitize_tail
from mtrl.types import Needs, Rewards, Rollouts, Signals
from mtrl.utils.errors import RunError

Schedule = Sequence[tuple[float, Sequence[float]]]
Sample = Mapping[str, Any]
Outcomes = Mapping[str, Sequence[Outcome]]  # by the function's name, one per row

MODEL = "model"  # name of the reward model's part
MAX_FAILED_STEPS = 10  # consecutive steps without a scored response, after which a run ends

logger = logging.getLogger(__name__)


class RewardFunction(Protocol):
    """One part of the reward, computed asynchronously."""

    needs: Needs  # the signals it reads; with any, it runs after the probes and receives their results

    def submit(self, samples: Sequence[Sample], group: Sequence[int] | None = None) -> Sequence[Future[Outcome]]:
        """Return a future for each sample. `group`: the prompt of each, for functions that compare; None: all
        different."""

    def close(self) -> object: ...


class ResponseScorer(Protocol):
    """A reward model: scores all conversations of a step at once."""

    def score(self, rollouts: Rollouts) -> Sequence[float | str]:
        """Return the score of each response, or the reason why it has none."""


class Builtin:
    """A built-in whose time is linear in the response, so it runs in this process without limits; the others run in the
    sandbox."""

    needs = Needs()

    def __init__(self, function: Callable[[Sample], float | None]) -> None:
        self.function = function

    def submit(self, samples: Sequence[Sample], group: Sequence[int] | None = None) -> list[Future[Outcome]]:
        return [completed_future(self._outcome(sample)) for sample in samples]

    def _outcome(self, sample: Sample) -> Outcome:
        try:
            return Outcome(self.function(sample))
        except Exception:  # a row with an unreadable truth or options
            return Outcome(failure=sanitize_tail(traceback.format_exc()))

    def close(self) -> None: ...


@dataclass
class RewardScorer:
    """`functions` by name, in the order of the weights; the model's weight is the last. `schedule`: (share of the run
    at which they begin, weights)."""

    functions: Mapping[str, RewardFunction]
    schedule: Schedule
    total_steps: int
    model: ResponseScorer | None = None
    normalize: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    failure_reward: float = 0.0
    options_key: str = "options"
    answer_key: str = "answer"
    wants_token_weights: bool = False  # a function must return them
    failed_steps: set[int] = field(default_factory=set)  # the latest steps, if all their responses failed
    warned_missing_weights: bool = False
    extra_names: dict[str, None] = field(default_factory=dict)  # logged extra values, in order of appearance
    warned_extras: bool = False
    warned_absent: set[str] = field(default_factory=set)  # parts that applied to no response of a step

    def submit(self, rollouts: Rollouts, step: int | None) -> SubmittedRewards:
        progress = {"global_step": self.total_steps if step is None else step, "max_steps": self.total_steps}
        samples = make_samples(rollouts, self.options_key, self.answer_key, progress)
        group = rollouts.group.tolist()
        futures = {name: f.submit(samples, group) for name, f in self.functions.items() if not f.needs}
        if self.model is not None:  # last, while the functions run in their processes
            outcomes = (Outcome(failure=x) if isinstance(x, str) else Outcome(x) for x in self.model.score(rollouts))
            futures[MODEL] = [completed_future(outcome) for outcome in outcomes]
        return SubmittedRewards(self, rollouts, step, samples, futures)

    def total(self, parts: Mapping[str, Tensor], group: Tensor, step: int | None) -> Tensor:
        if step is None:  # validation: the final weights, and no normalization, which would make every mean 0
            return combine(parts, scheduled_weights(1.0, self.schedule), group)
        weights = scheduled_weights(step / max(1, self.total_steps), self.schedule)
        return combine(parts, weights, group, self.normalize)

    def count_failure(self, step: int, all_failed: bool, cause: str) -> None:
        """Stop a run that trains on failure rewards only. A step that samples again counts once."""
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
class SubmittedRewards:
    """Rewards that are being computed."""

    scorer: RewardScorer
    rollouts: Rollouts
    step: int | None
    samples: list[dict[str, Any]]
    futures: Mapping[str, Sequence[Future[Outcome]]]  # the functions that need no signals

    def result(self, signals: Signals | None = None) -> Rewards:
        outcomes = self._outcomes(signals)
        parts = {name: torch.tensor([self._value(each) for each in column]) for name, column in outcomes.items()}
        failed = torch.tensor([any(each.failure for each in row) for row in zip(*outcomes.values(), strict=True)])
        causes = [self._cause(name, column) for name, column in outcomes.items() if any(o.failure for o in column)]
        for cause in causes:  # one warning per step and function
            logger.warning("%s", cause)
        if self.step is not None:
            self.scorer.count_failure(self.step, bool(failed.all()), "\n".join(causes))
        self._warn_absent(outcomes)
        total = self.scorer.total(parts, self.rollouts.group, self.step)
        self._register_extras(outcomes)
        extras = extra_values(outcomes, self.scorer.extra_names)
        return Rewards(total, parts | extras, failed, token_weights=self._token_weights(outcomes))

    def _outcomes(self, signals: Signals | None) -> Outcomes:
        """Wait for all outcomes, in the order of the functions. Those that need signals start now."""
        futures, late = dict(self.futures), {n: f for n, f in self.scorer.functions.items() if n not in self.futures}
        if late:
            measured = signal_lists(self.rollouts, signals)
            samples = [{**s, "signals": m} for s, m in zip(self.samples, measured, strict=True)]
            group = self.rollouts.group.tolist()
            futures |= {name: function.submit(samples, group) for name, function in late.items()}
        names = [*self.scorer.functions, *([MODEL] if MODEL in futures else [])]
        return {name: [future.result() for future in futures[name]] for name in names}

    def _value(self, outcome: Outcome) -> float:
        if outcome.failure:
            return self.scorer.failure_reward
        return math.nan if outcome.value is None else outcome.value

    def _cause(self, name: str, column: Sequence[Outcome]) -> str:
        """Describe the first failure in full, and how many there were."""
        rows = [row for row, outcome in enumerate(column) if outcome.failure]
        first = column[rows[0]]
        prompt = self.rollouts.prompts[int(self.rollouts.group[rows[0]])]
        printed = f"\nIt printed: {first.output.strip()}" if first.output.strip() else ""
        return (
            f"reward function {name} failed on {len(rows)} of {len(column)} responses, which get failure_reward="
            f"{self.scorer.failure_reward:g}. The first, {prompt.task.origin}: {first.failure}{printed}"
        )

    def _warn_absent(self, outcomes: Outcomes) -> None:
        """Warn about a part that applies to no response and so changes no total; usually the answers are in another
        column."""
        absent = {name for name, column in outcomes.items() if all(o.value is None and not o.failure for o in column)}
        when = "at validation" if self.step is None else f"at step {self.step + 1}"
        reason = ""
        if all(sample["ground_truth"] is None for sample in self.samples):
            reason = f"; their rows have no answer in the column {self.scorer.answer_key!r} (dataset.answer_key)"
        for name in sorted(absent - self.scorer.warned_absent):
            logger.warning("%s reward %s applies to none of %d responses and is left out%s (this is logged once)",
                           when, name, len(self.samples), reason)  # fmt: skip
        self.scorer.warned_absent |= absent

    def _register_extras(self, outcomes: Outcomes) -> None:
        """Add the names of new extra values, up to a limit: a function that makes up names would fill tables and
        disks."""
        known = self.scorer.extra_names
        names = dict.fromkeys(name for column in outcomes.values() for outcome in column for name in outcome.extras)
        new = [name for name in names if name not in known and name not in outcomes and name != TOKEN_WEIGHTS]
        known |= dict.fromkeys(new[: max(0, MAX_EXTRAS - len(known))])
        if not self.scorer.warned_extras and any(name not in known for name in new):
            self.scorer.warned_extras = True
            logger.warning("the reward functions return more than %d different extra values; only the first %d are "
                           "logged (this is logged once)", MAX_EXTRAS, MAX_EXTRAS)  # fmt: skip

    def _token_weights(self, outcomes: Outcomes) -> Tensor | None:
        """Return the token weights of the first function that returns some; other rows, or failed ones, get ones."""
        returned = {name: [each.extras.get(TOKEN_WEIGHTS) for each in column] for name, column in outcomes.items()}
        name = next((name for name, lists in returned.items() if any(each is not None for each in lists)), None)
        lists = returned[name] if name else [None] * len(self.rollouts)
        missing = sum(each is None for each in lists)
        if missing and (name or self.scorer.wants_token_weights) and not self.scorer.warned_missing_weights:
            self.scorer.warned_missing_weights = True
            logger.warning("%s returned no token_weights for %d of %d responses; their tokens get weight 1 (this is "
                           "logged once)", name or "the reward functions", missing, len(lists))  # fmt: skip
        return pad_with_ones([each or [] for each in lists], self.rollouts.mask.shape[1]) if name else None


def pad_with_ones(lists: Sequence[Sequence[float]], width: int) -> Tensor:
    """[N, width]: shorter lists are padded with 1, longer ones are cut."""
    weights = torch.ones(len(lists), width)
    for row, values in enumerate(lists):
        weights[row, : len(values)] = torch.tensor(values[:width], dtype=torch.float32)
    return weights


def extra_values(outcomes: Outcomes, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the extra numbers of the functions as separate parts; NaN if a response has none."""
    extras = {}
    for name in names:
        column = [logged_number(outcome.extras.get(name)) for row in outcomes.values() for outcome in row]
        if not all(map(math.isnan, column)):
            per_function = torch.tensor(column).view(len(outcomes), -1)
            extras[name] = per_function.nanmean(0)
    return extras
