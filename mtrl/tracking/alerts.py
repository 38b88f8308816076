"""Warnings about runs that go wrong unnoticed. Each is logged once and says what to do.

A rule looks at the first and the latest steps of the run and returns a warning or None.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from mtrl.protocols import Tracker

logger = logging.getLogger(__name__)

Step = Mapping[str, float]
READ_METRICS = (
    "actor/entropy", "actor/grad_norm", "actor/skipped_steps", "reward/success_rate", "reward/zero_std_groups",
    "response_length/truncated", "rollout/logprob_gap_mean", "perf/cpu_share", "perf/cpu_free",
)  # fmt: skip


@dataclass(frozen=True)
class Thresholds:
    first_steps: int = 5  # later steps are compared with these: enough to average out an odd batch, too few to learn
    patience: int = 5  # consecutive steps that must agree: one batch may be odd
    remembered: int = 50  # steps stored for the rules
    entropy_left: float = 0.1  # share of the initial entropy; healthy runs lose half, collapsed ones nearly all
    solved: float = 0.9  # at this success rate low entropy is desired
    truncated: float = 0.2  # share of the responses above which the length limit decides the reward
    truncated_growth: float = 0.1  # rise of that share since the first steps; a run may start high and come down
    logprob_gap: float = 0.1  # nats; bf16 rounding gives 0.01 to 0.02
    spike: float = 10.0  # gradient norm as a multiple of the median of the latest steps
    spike_after: int = 10  # gradient norms needed for a median
    cpu_share: float = 0.5  # share of the CPU time its threads ask for that a run should get when the CPUs are busy
    cpu_free: float = 0.1  # the CPUs are busy if a smaller share of their time is free


@dataclass(frozen=True, eq=False)
class StepWindow:
    first: Sequence[Step]
    recent: Sequence[Step]  # the newest last
    limits: Thresholds

    def initial_mean(self, name: str) -> float | None:
        """The mean of a metric over the first steps; None if there are too few."""
        values = [step[name] for step in self.first if name in step]
        return fmean(values) if len(values) >= self.limits.first_steps else None

    def latest(self, name: str) -> list[float]:
        """A metric's values in the latest `patience` steps; empty if there are fewer."""
        values = [step[name] for step in self.recent[-self.limits.patience :] if name in step]
        return values if len(values) == self.limits.patience else []


# --------------------------------------------------------------------------------------------------------------- rules
def entropy_collapse(window: StepWindow) -> str | None:
    start, latest = window.initial_mean("actor/entropy"), window.latest("actor/entropy")
    success = window.latest("reward/success_rate")
    if not start or not latest or max(latest) >= window.limits.entropy_left * start:
        return None
    if success and fmean(success) >= window.limits.solved:
        return None
    return (
        f"entropy collapse: {fmean(latest):.3g} after {start:.3g} in the first steps; all responses to a prompt become "
        "the same. Raise worker.actor.clip_ratio_high or worker.rollout.temperature, lower worker.actor.optim.lr, "
        "switch off optimization.use_entropy_penalty, or resume from an earlier checkpoint."
    )


def no_variance(window: StepWindow) -> str | None:
    latest = window.latest("reward/zero_std_groups")
    if not latest or min(latest) < 1:
        return None
    success = window.latest("reward/success_rate")
    why = "the rewards of each prompt's responses are equal"
    if success and fmean(success) >= 0.99:
        why = "every response is correct: the prompts have become too easy"
    elif success and max(success) == 0:
        why = "no response is correct: the prompts are too hard, or the reward does not find the answers"
    return (
        f"no group has had different rewards for {len(latest)} steps, so nothing is learned; {why}. Read the responses "
        "in rollouts.jsonl, change the prompts, or add a reward that distinguishes the responses."
    )


def growing_truncation(window: StepWindow) -> str | None:
    name = "response_length/truncated"
    start, latest = window.initial_mean(name), window.latest(name)
    limits = window.limits
    if start is None or not latest or min(latest) <= max(limits.truncated, start + limits.truncated_growth):
        return None
    return (
        f"growing truncation: {fmean(latest):.0%} of the responses are cut at the length limit, up from {start:.0%} in "
        "the first steps. Raise dataset.max_response_length, add the reward `length`, or set "
        "optimization.mask_truncated_responses=true."
    )


def logprob_gap(window: StepWindow) -> str | None:
    """Warn if sampler and trainer disagree. With top-p or top-k the gap covers the tokens that the cut leaves."""
    latest = window.latest("rollout/logprob_gap_mean")
    if not latest or min(latest) <= window.limits.logprob_gap:
        return None
    return (
        f"log-prob gap: sampler and trainer differ by {fmean(latest):.3g} nats per token, far above rounding error: "
        "they use different weights, images or templates. Compare with worker.rollout.name=local and "
        "worker.actor.fsdp.mixed_precision_dtype=fp32; keep optimization.tis_clip on until then."
    )


def gradient_spike(window: StepWindow) -> str | None:
    norms = [step.get("actor/grad_norm", 0.0) for step in window.recent]
    before = [norm for norm in norms[:-1] if norm > 0]  # 0: nothing was learned in that step
    if len(before) < window.limits.spike_after or norms[-1] <= window.limits.spike * median(before):
        return None
    return (
        f"gradient spike: norm {norms[-1]:.3g}, {norms[-1] / median(before):.0f} times its median. It is clipped to "
        "worker.actor.max_grad_norm; if the reward falls after it, lower worker.actor.optim.lr, and look for extreme "
        "rewards of this step in rollouts.jsonl."
    )


DIVERGED = (
    "Lower worker.actor.optim.lr, look for extreme rewards of this step in rollouts.jsonl, or compute in fp32 "
    "(worker.actor.fsdp.mixed_precision_dtype)."
)


def skipped_update(window: StepWindow) -> str | None:
    if not window.recent[-1].get("actor/skipped_steps", 0.0):
        return None
    return f"an update was skipped because its gradient is not finite. {DIVERGED}"


def busy_processors(window: StepWindow) -> str | None:
    """Warn if other programs take the CPUs. A low share while CPUs are free is fine: small models do not keep many
    threads busy."""
    share, free = window.latest("perf/cpu_share"), window.latest("perf/cpu_free")
    if not share or not free or max(share) >= window.limits.cpu_share or max(free) >= window.limits.cpu_free:
        return None
    return (
        f"busy processors: the steps get {fmean(share):.0%} of the CPU time that their threads ask for; other programs "
        "or reward functions take the rest. The threads then wait for each other, and a step takes far longer than it "
        "needs: stop the other programs, or start the run with fewer threads (OMP_NUM_THREADS=1)."
    )


Rule = Callable[[StepWindow], str | None]
RULES: tuple[Rule, ...] = (
    entropy_collapse, no_variance, growing_truncation, logprob_gap, gradient_spike, skipped_update, busy_processors,
)  # fmt: skip


class RunAlerts(Tracker):
    """A tracker that only warns. A resumed run passes the first steps of its first attempt as `first`: a run that has
    already collapsed must not be compared with itself. Pass groups=False for estimators that do not compare the
    responses of a prompt: to them groups without variance do no harm."""

    def __init__(self, first: Iterable[Step] = (), *, groups: bool = True, limits: Thresholds | None = None) -> None:
        self.limits = limits or Thresholds()
        self._first: list[Step] = []
        self._recent: deque[Step] = deque(maxlen=self.limits.remembered)
        self._warned_non_finite = False
        self._rules = [rule for rule in RULES if groups or rule is not no_variance]
        for step in first:
            self._add_first(step)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._add_first(values)
        self._recent.append(select_finite(values))
        self._warn_non_finite(step, values)
        window = StepWindow(self._first, tuple(self._recent), self.limits)
        for rule in tuple(self._rules):
            if (warning := rule(window)) is not None:
                self._rules.remove(rule)
                logger.warning("step %d: %s", step, warning)

    def _warn_non_finite(self, step: int, values: Mapping[str, float]) -> None:
        names = [name for name, x in values.items() if x is not None and not math.isfinite(x)]
        if not names or self._warned_non_finite or values.get("actor/skipped_steps"):  # skipped_update reports those
            return
        self._warned_non_finite = True
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        message = "step %d: %s are NaN or infinite, null in metrics.jsonl: the run diverges. %s"
        logger.warning(message, step, listed, DIVERGED)

    def _add_first(self, values: Mapping[str, float]) -> None:
        if len(self._first) < self.limits.first_steps:
            self._first.append(select_finite(values))


def select_finite(values: Mapping[str, float]) -> Step:
    """The finite metrics that the rules read."""
    return {name: x for name in READ_METRICS if (x := values.get(name)) is not None and math.isfinite(x)}
