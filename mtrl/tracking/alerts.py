"""What ruins runs unseen, said once each, with what to do about it.

A rule looks at the first steps of the run and at the last ones and answers with a warning, or with None.
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
READ = (
    "actor/entropy", "actor/grad_norm", "actor/skipped_steps", "reward/success_rate", "reward/zero_std_groups",
    "response_length/truncated", "rollout/logprob_gap_mean", "perf/cpu_share", "perf/cpu_free",
)  # fmt: skip


@dataclass(frozen=True)
class Thresholds:
    first_steps: int = 5  # steps that later ones are compared with: enough for an odd batch, too few to learn much
    patience: int = 5  # steps in a row that must agree: one batch may be odd
    remembered: int = 50  # steps kept for the rules
    entropy_left: float = 0.1  # share of the first steps' entropy; healthy runs lose half, collapsed ones nearly all
    solved: float = 0.9  # success from which low entropy is what one wants
    truncated: float = 0.2  # share of the responses from which length decides the reward
    truncated_growth: float = 0.1  # how far that share is above the first steps'; a run may start high and come down
    logprob_gap: float = 0.1  # nats; rounding of bf16 gives 0.01 to 0.02
    spike: float = 10.0  # a gradient norm of so many times the median of the last steps
    cpu_share: float = 0.5  # share of its threads' processor time that a run should get, where processors are busy
    cpu_free: float = 0.1  # share of the processors' time below which they are
    spike_after: int = 10  # gradient norms that are enough for a median


@dataclass(frozen=True, eq=False)
class SeenValues:
    first: Sequence[Step]
    recent: Sequence[Step]  # the newest last
    limits: Thresholds

    def start(self, name: str) -> float | None:
        """The mean of a metric over the first steps, once there are enough."""
        values = [step[name] for step in self.first if name in step]
        return fmean(values) if len(values) >= self.limits.first_steps else None

    def lately(self, name: str) -> list[float]:
        """A metric's values in the last steps, as many as must agree; empty where there are fewer."""
        values = [step[name] for step in self.recent[-self.limits.patience :] if name in step]
        return values if len(values) == self.limits.patience else []


# --------------------------------------------------------------------------------------------------------------- rules
def entropy_collapse(seen: SeenValues) -> str | None:
    start, lately = seen.start("actor/entropy"), seen.lately("actor/entropy")
    success = seen.lately("reward/success_rate")
    if not start or not lately or max(lately) >= seen.limits.entropy_left * start:
        return None
    if success and fmean(success) >= seen.limits.solved:
        return None
    return (
        f"entropy collapse: {fmean(lately):.3g} after {start:.3g} in the first steps; all responses to a prompt become "
        "the same. Raise worker.actor.clip_ratio_high or worker.rollout.temperature, lower worker.actor.optim.lr, "
        "switch off optimization.use_entropy_penalty, or go on from an earlier checkpoint."
    )


def no_variance(seen: SeenValues) -> str | None:
    lately = seen.lately("reward/zero_std_groups")
    if not lately or min(lately) < 1:
        return None
    success = seen.lately("reward/success_rate")
    why = "the rewards of each prompt's responses are equal"
    if success and fmean(success) >= 0.99:
        why = "every response is right: the prompts are too easy by now"
    elif success and max(success) == 0:
        why = "no response is right: the prompts are too hard, or the answers are not read from the responses"
    return (
        f"no group has varied rewards for {len(lately)} steps, so nothing is learnt; {why}. Read the responses in "
        "rollouts.jsonl, change the prompts, or add a reward that tells them apart."
    )


def growing_truncation(seen: SeenValues) -> str | None:
    name = "response_length/truncated"
    start, lately = seen.start(name), seen.lately(name)
    if start is None or not lately or min(lately) <= max(seen.limits.truncated, start + seen.limits.truncated_growth):
        return None
    return (
        f"growing truncation: {fmean(lately):.0%} of the responses are cut at the length limit, {start:.0%} in the "
        "first steps. Raise dataset.max_response_length, add the reward `length`, or set "
        "optimization.mask_truncated_responses=true."
    )


def logprob_gap(seen: SeenValues) -> str | None:
    """Warns where sampler and trainer disagree. With top-p or top-k this gap is that on what the cut leaves."""
    lately = seen.lately("rollout/logprob_gap_mean")
    if not lately or min(lately) <= seen.limits.logprob_gap:
        return None
    return (
        f"log-prob gap: sampler and trainer differ by {fmean(lately):.3g} nats a token, far above rounding. They see "
        "other weights, images or templates. Compare with worker.rollout.name=local and "
        "worker.actor.fsdp.mixed_precision_dtype=fp32; keep optimization.tis_clip on meanwhile."
    )


def gradient_spike(seen: SeenValues) -> str | None:
    norms = [step.get("actor/grad_norm", 0.0) for step in seen.recent]
    before = [norm for norm in norms[:-1] if norm > 0]  # 0: nothing was learnt there
    if len(before) < seen.limits.spike_after or norms[-1] <= seen.limits.spike * median(before):
        return None
    return (
        f"gradient spike: norm {norms[-1]:.3g}, {norms[-1] / median(before):.0f} times its median. It is cut to "
        "worker.actor.max_grad_norm; if the reward falls after it, lower worker.actor.optim.lr, and look for extreme "
        "rewards of this step in rollouts.jsonl."
    )


def skipped_update(seen: SeenValues) -> str | None:
    if not seen.recent[-1].get("actor/skipped_steps", 0.0):
        return None
    return (
        "an update had a gradient that is not finite and was left out. Lower worker.actor.optim.lr, look for extreme "
        "rewards of this step in rollouts.jsonl, or compute in fp32 (worker.actor.fsdp.mixed_precision_dtype)."
    )


def null_metrics(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"{', '.join(names[:3])}{more} are NaN or infinite, null in metrics.jsonl: the run diverges. Lower "
        "worker.actor.optim.lr, look for extreme rewards of this step in rollouts.jsonl, or compute in fp32 "
        "(worker.actor.fsdp.mixed_precision_dtype)."
    )


def busy_processors(seen: SeenValues) -> str | None:
    """Warns where others take the processors. A low share beside free processors is no such case: small models do not
    keep many threads busy."""
    share, free = seen.lately("perf/cpu_share"), seen.lately("perf/cpu_free")
    if not share or not free or max(share) >= seen.limits.cpu_share or max(free) >= seen.limits.cpu_free:
        return None
    return (
        f"busy processors: the steps get {fmean(share):.0%} of the processor time that their threads ask for; other "
        "programs, or reward functions, take the rest. Threads wait for each other then, and a step takes far longer "
        "than it needs: stop the other programs, or start a run with fewer threads (OMP_NUM_THREADS=1)."
    )


Rule = Callable[[SeenValues], str | None]
RULES: tuple[Rule, ...] = (
    entropy_collapse,
    no_variance,
    growing_truncation,
    logprob_gap,
    gradient_spike,
    skipped_update,
    busy_processors,
)


class RunAlerts(Tracker):
    """A tracker that only warns. `first` are the first steps of the run where it goes on from an earlier attempt: a run
    that has collapsed already must not be compared with itself. Without `groups` (estimators that compare no responses
    of one prompt) groups without variance are no harm."""

    def __init__(self, first: Iterable[Step] = (), *, groups: bool = True, limits: Thresholds | None = None) -> None:
        self.limits = limits or Thresholds()
        self._first: list[Step] = []
        self._recent: deque[Step] = deque(maxlen=self.limits.remembered)
        self._told_of_null = False
        self._rules = [rule for rule in RULES if groups or rule is not no_variance]
        for step in first:
            self._remember_start(step)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._remember_start(values)
        self._recent.append(finite_metrics(values))
        self._say_null(step, values)
        seen = SeenValues(self._first, tuple(self._recent), self.limits)
        for rule in tuple(self._rules):
            if (warning := rule(seen)) is not None:
                self._rules.remove(rule)
                logger.warning("step %d: %s", step, warning)

    def _say_null(self, step: int, values: Mapping[str, float]) -> None:
        """Once. Of an update that was left out, its own rule speaks."""
        names = [name for name, x in values.items() if x is not None and not math.isfinite(x)]
        if names and not self._told_of_null and not values.get("actor/skipped_steps"):
            self._told_of_null = True
            logger.warning("step %d: %s", step, null_metrics(names))

    def _remember_start(self, values: Mapping[str, float]) -> None:
        if len(self._first) < self.limits.first_steps:
            self._first.append(finite_metrics(values))


def finite_metrics(values: Mapping[str, float]) -> Step:
    """The numbers that the rules read, where there are any."""
    return {name: x for name in READ if (x := values.get(name)) is not None and math.isfinite(x)}
