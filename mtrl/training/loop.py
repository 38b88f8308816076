"""THE loop: how a vision-language model learns, one step after the other.

    prompts -> responses -> rewards   (user code in its sandbox, while the probes run)
                         -> signals   (per token: dependency on the image, entropy, reference log-prob, ...)
            -> dynamic sampling and replay, if on, replace groups that teach nothing
            -> advantages -> credit   (what each token gets, decided here, before anything is split)
            -> update                 (actor and critic add gradients; neither knows which algorithm this is)

Concrete classes stand behind `protocols.py` and are chosen by `compose/`. A step is keyed by its number: prompts,
samples and perturbations of step k do not depend on what ran before, so a run can be repeated and resumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtrl.algorithms.advantages import estimate_advantages
from mtrl.algorithms.batches import assemble
from mtrl.algorithms.credit import assign, credit_metrics
from mtrl.algorithms.losses import Loss
from mtrl.algorithms.metrics import Metrics, learnt_metrics, step_metrics
from mtrl.algorithms.value_loss import value_metrics
from mtrl.protocols import Actor, Critic, Generator, Prober, Scorer, Stateful, Store, Synced, TaskSource, Tracker
from mtrl.training.algorithm_spec import AlgorithmSpec, due
from mtrl.training.clock import Clock
from mtrl.training.collect import RolloutCollector, with_maps
from mtrl.training.dynamic_sampling import CollectedBatch, PromptCounts
from mtrl.training.off_policy import RUN_STATE, OneStepAhead
from mtrl.training.replay_memory import ReplayMemory
from mtrl.training.validation import Validation
from mtrl.types import Experience, TrainBatch


@dataclass
class Components:
    """The objects that the loop works with."""

    source: TaskSource
    generator: Generator
    scorer: Scorer
    probers: Sequence[Prober]  # all that measure signals, the actor first
    actor: Actor
    tracker: Tracker
    store: Store
    validation: Validation | None
    reference: Synced | None = None  # only if it is synced with the policy
    stop: Callable[[], bool] = lambda: False  # whether the run was asked to stop
    critic: Critic | None = None  # also one of the probers
    devices: int = 1  # processes that compute


class Loop:
    def __init__(self, components: Components, spec: AlgorithmSpec) -> None:
        self.components, self.spec = components, spec
        self.divergence = spec.divergence  # its coefficient may adapt
        self.prompts = PromptCounts()
        self.memory = None if spec.replay is None else ReplayMemory(spec.replay, spec.seed)
        self.ahead = OneStepAhead(lambda: self.done) if spec.off_policy_steps else None
        self.version, self.done, self.saved = 0, 0, 0  # version of the weights; steps done; last step saved
        self.saved_at = time.monotonic()
        self.whole: dict[str, Any] | None = None  # state after the last step; None once an update has begun
        self.unvalidated = False  # whether the validation of the last step is due and has not been done
        self.score: float | None = None  # of the validation of the last step
        self.clock = Clock()

    def run(self) -> None:
        """Run to the last step, or until asked to stop. Logs count the steps that are done: 0 is before training."""
        if self.spec.validate_first:
            self.validate()
        if self.unvalidated and self.end_step():  # an error ended the run between this step and its validation
            return
        for step in range(self.done, self.spec.total_steps):
            self.components.tracker.metrics(step + 1, self.step(step))
            if self.end_step():
                return

    def end_step(self) -> bool:
        """Validate and save, if they are due; returns whether the run was asked to stop."""
        components, spec = self.components, self.spec
        if self.unvalidated:
            self.validate()
        stop, last = components.stop(), self.done == spec.total_steps
        if last or stop or self.is_save_due() or components.store.is_best(self.score):
            self.save()
        return stop

    def step(self, step: int) -> Metrics:
        components, spec = self.components, self.spec
        self.clock = clock = Clock()
        batch = self.collect(step)
        with clock("credit"):
            experience = self.assign_credit(batch.experience, step)
            loss = spec.loss.with_divergence(self.divergence)
            batches = list(assemble(spec.batches, loss, experience, (spec.seed, step)))
        # Before the update: after an error in the metrics of a rule of one's own, a resume repeats this step alone.
        described = step_metrics(batch.own, spec.sampling.cut) | credit_metrics(spec.credit, experience)
        recorded = with_maps(experience, components.actor, spec.maps_per_step, step, clock)
        with clock("update"):
            self.whole = None
            learnt = self.learn(batches, loss, step)
        if self.ahead is not None:
            self.ahead.wait()
        with clock("publish"):
            self.publish()
        values = self.adapt(batch.own) | self.remember(experience, batch, step)
        self.done = step + 1
        if components.reference is not None and due(self.done, spec.sync_ref_every):
            components.reference.sync()
        metrics = described | learnt | value_metrics(experience) | values | components.source.metrics()
        tokens, rows = int(experience.rollouts.mask.sum()), len(experience)
        self.whole, self.score = self.state(), None  # from here on an error loses nothing of this step
        self.unvalidated = components.validation is not None and self.validation_due
        try:
            components.tracker.rollouts(step + 1, recorded)
        except Exception:  # the step is saved before the error ends the run, so no later attempt would write its row
            components.tracker.metrics(step + 1, metrics | clock.metrics(tokens, rows, components.devices))
            raise
        return metrics | clock.metrics(tokens, rows, components.devices)

    # ------------------------------------------------------------------------------------------- the verbs of a step
    def collect(self, step: int) -> CollectedBatch:
        """Sample, score and probe the responses that this step learns from."""
        parts = self.components
        collector = RolloutCollector(
            parts.source, parts.generator, parts.scorer, parts.probers, self.spec, step, self.version, self.clock
        )
        return collector.run(self.memory) if self.ahead is None else self.ahead.run(collector, self.memory)

    def assign_credit(self, experience: Experience, step: int) -> Experience:
        """Turn rewards into advantages, and advantages into the credit of each token."""
        penalty = None if self.divergence is None else self.divergence.reward_penalty(experience.signals)
        advantage, returns = estimate_advantages(self.spec.estimator, experience, penalty)
        experience = replace(experience, advantage=advantage, returns=returns)
        credit = assign(self.spec.credit, experience, (self.spec.seed, step))
        return replace(experience, credit=replace(credit, silenced=self.silenced(experience, step)))

    def silenced(self, experience: Experience, step: int) -> Tensor | None:
        """[N] bool: the responses that the actor gets no gradient from in this step, for the records; None: no rule."""
        if step < self.spec.critic_warmup:
            return torch.ones(len(experience), dtype=torch.bool)
        return experience.rollouts.truncated if self.spec.batches.mask_truncated_responses else None

    def learn(self, batches: Sequence[TrainBatch], loss: Loss, step: int) -> Metrics:
        """Update the critic, if any, and after its warm-up the actor."""
        critic, spec = self.components.critic, self.spec
        updated = {} if critic is None else critic.update(batches, spec.value_loss)
        learnt: Metrics = {f"critic/{name}": value for name, value in updated.items()}
        if step >= spec.critic_warmup:
            learnt |= learnt_metrics(self.components.actor.update(batches, loss), spec.sampling.cut)
        return learnt

    def publish(self) -> None:
        """Load the actor's weights into the generator."""
        with self.components.generator.resident():
            weights = self.components.actor.publish()
            self.components.generator.load(weights)
        self.version = weights.version

    def adapt(self, experience: Experience) -> Metrics:
        """Report the divergence from the reference and adapt its coefficient, if that is on."""
        if self.divergence is None:
            return {}
        self.divergence, metrics = self.divergence.after_step(experience.signals, experience.rollouts.mask)
        return metrics

    def remember(self, experience: Experience, batch: CollectedBatch, step: int) -> Metrics:
        """Count the prompts of the step, and store the groups that are worth replaying."""
        self.prompts += batch.counts
        counts = {} if self.spec.filtering is None else self.prompts.metrics()
        stored = {} if self.memory is None else self.memory.admit(experience, batch.replayed, step)
        return batch.metrics | counts | stored

    # ------------------------------------------------------------------------------------- validation, save and restore
    @property
    def validation_due(self) -> bool:
        return self.done == self.spec.total_steps or due(self.done, self.spec.val_freq)

    def validate(self) -> None:
        """Validate, and keep the score that the best model is chosen by."""
        components = self.components
        if components.validation is None:
            return
        reads_attention = "attention_mass" in self.spec.needs or self.spec.attention_every
        prober = components.actor if reads_attention else None
        result = components.validation.run(components.generator, components.scorer, self.version, prober)
        self.score, self.unvalidated = result.score, False
        components.tracker.validation(self.done, result.metrics, result.by, result.samples)

    def save(self) -> None:
        """Save the last step. Its state is the one from its end: within the next step the source has moved on."""
        assert self.whole is not None, "an update has begun"
        snapshots = {name: item.snapshot() for name, item in self.state_items().items()}
        state = self.whole | ({"unvalidated": True} if self.unvalidated else {})
        self.components.store.save(self.done, snapshots, state, self.score)
        self.saved, self.saved_at = self.done, time.monotonic()

    def is_save_due(self) -> bool:
        """By steps, or by the minutes since the last checkpoint or the start: long steps must not cost hours."""
        freq, minutes = self.spec.save_freq, self.spec.save_minutes
        timed = minutes is not None and freq > 0 and time.monotonic() - self.saved_at >= 60 * minutes
        return timed or due(self.done, freq)

    def state_items(self) -> dict[str, Stateful]:
        """Everything that changes from step to step, by its name in a checkpoint."""
        parts = self.components
        others = {"critic": parts.critic, "reference": parts.reference, "replay": self.memory, "ahead": self.ahead}
        return {"actor": parts.actor} | {name: item for name, item in others.items() if item is not None}

    def state(self) -> dict[str, Any]:
        """What the next step depends on besides the stateful items; everything else is keyed by the step number."""
        state = {"step": self.done, "source": self.components.source.state(), "prompts": asdict(self.prompts)}
        state["divergence_coef"] = self.divergence and self.divergence.divergence_coef
        state |= {"ahead": True} if self.ahead else {}
        return state if self.memory is None else state | {"replay": len(self.memory.buffer.entries)}

    def restore(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        self.done = self.saved = state["step"]
        self.unvalidated = self.components.validation is not None and bool(state.get("unvalidated"))
        self.components.source.restore(state["source"])
        self.prompts = PromptCounts(**state.get("prompts", {}))
        if self.divergence is not None and self.divergence.adaptive and state["divergence_coef"] is not None:
            self.divergence = replace(self.divergence, divergence_coef=state["divergence_coef"])
        saved = {name: item for name, item in self.state_items().items() if name not in RUN_STATE or name in state}
        self.components.store.restore(checkpoint, saved)
        self.whole = self.state()
        self.publish()
