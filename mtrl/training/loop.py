"""THE loop: how a vision-language model learns, one step after the other.

    prompts -> responses -> rewards   (user code, in its sandbox, meanwhile)
                         -> signals   (what each token depends on: the image, its own certainty, the reference)
            -> groups that teach nothing give way to fresh prompts, or to groups of earlier steps, where that is on
            -> advantages -> credit   (what each token deserves, decided here, before anything is split)
            -> update                 (the actor adds gradients, and a critic; neither learns which algorithm this was)

Everything concrete stands behind `protocols.py` and is chosen by `build/`. A step is keyed by its number: prompts,
samples and perturbations of step k are the same whatever ran before, so a run can be repeated and resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

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
from mtrl.training.off_policy import OWN, OneStepAhead
from mtrl.training.replay_memory import ReplayMemory
from mtrl.training.validation import Validation
from mtrl.types import Experience, TrainBatch


@dataclass
class Components:
    """What the loop works with."""

    source: TaskSource
    generator: Generator
    scorer: Scorer
    probers: Sequence[Prober]  # all that measure signals, the actor first
    actor: Actor
    tracker: Tracker
    store: Store
    validation: Validation | None
    reference: Synced | None = None  # where it does not stay what it was
    stop: Callable[[], bool] = lambda: False  # whether somebody asked the run to stop
    critic: Critic | None = None  # where advantages need one; it is among the probers too
    devices: int = 1  # processes that compute


class Loop:
    def __init__(self, components: Components, algorithm_spec: AlgorithmSpec) -> None:
        self.components, self.algorithm_spec = components, algorithm_spec
        self.divergence = algorithm_spec.divergence  # its coefficient may adapt
        self.prompts = PromptCounts()  # what became of all that were asked
        self.memory = (
            None if algorithm_spec.replay is None else ReplayMemory(algorithm_spec.replay, algorithm_spec.seed)
        )
        self.ahead = (
            OneStepAhead(lambda: self.done) if algorithm_spec.off_policy_steps else None
        )  # what a step learns from, sampled before it
        self.version, self.done, self.saved = 0, 0, 0  # version of the weights; steps done; the last one saved
        self.whole: dict[str, Any] | None = None  # the state after the last step; None once an update has begun
        self.clock = Clock()

    def run(self) -> None:
        """Runs to the last step, or until asked to stop. Logs count the steps that are done: 0 is before training."""
        components, algorithm_spec = self.components, self.algorithm_spec
        if algorithm_spec.validate_first:
            self.validate()
        for step in range(self.done, algorithm_spec.total_steps):
            components.tracker.metrics(step + 1, self.step(step))
            last = self.done == algorithm_spec.total_steps
            score = self.validate() if last or due(self.done, algorithm_spec.validate_every) else None
            stop = components.stop()
            if last or stop or due(self.done, algorithm_spec.save_every) or components.store.is_best(score):
                self.save(score)
            if stop:
                return

    def step(self, step: int) -> Metrics:
        components, algorithm_spec = self.components, self.algorithm_spec
        self.clock = clock = Clock()
        gathered = self.gather(step)
        with clock("credit"):
            experience = self.give_credit(gathered.experience, step)
            loss = algorithm_spec.loss.with_divergence(self.divergence)
            batches = list(assemble(algorithm_spec.batches, loss, experience, (algorithm_spec.seed, step)))
        shown = with_maps(experience, components.actor, algorithm_spec.maps_per_step, step, clock)
        with clock("update"):
            self.whole = None
            learnt = self.learn(batches, loss, step)
        if self.ahead is not None:
            self.ahead.settle()
        with clock("publish"):
            self.publish()
        adapted = self.adapt(gathered.own) | self.remember(experience, gathered, step)
        self.done = step + 1
        if components.reference is not None and due(self.done, algorithm_spec.sync_ref_every):
            components.reference.refresh()
        self.whole = self.state()  # from here on an error costs nothing of this step
        components.tracker.rollouts(step + 1, shown)
        values = step_metrics(gathered.own, algorithm_spec.sampling.cut) | credit_metrics(
            algorithm_spec.credit, experience
        )
        values |= learnt | value_metrics(experience) | adapted | components.source.metrics()
        return values | clock.metrics(int(experience.rollouts.mask.sum()), len(experience), components.devices)

    # ------------------------------------------------------------------------------------------- the verbs of a step
    def gather(self, step: int) -> CollectedBatch:
        """Responses, what was measured of them and what they earned: all that a step learns from."""
        of = self.components
        way = RolloutCollector(
            of.source, of.generator, of.scorer, of.probers, self.algorithm_spec, step, self.version, self.clock
        )
        return way.run(self.memory) if self.ahead is None else self.ahead.run(way, self.memory)

    def give_credit(self, experience: Experience, step: int) -> Experience:
        """Turns rewards into advantages, and decides what each token gets of them."""
        penalty = None if self.divergence is None else self.divergence.reward_penalty(experience.signals)
        advantage, returns = self.algorithm_spec.estimator.estimate(experience, penalty)
        experience = replace(experience, advantage=advantage, returns=returns)
        return replace(
            experience, credit=assign(self.algorithm_spec.credit, experience, (self.algorithm_spec.seed, step))
        )

    def learn(self, batches: Sequence[TrainBatch], loss: Loss, step: int) -> Metrics:
        """A critic learns at every step, the actor from where the critic's warm-up ends."""
        critic, algorithm_spec = self.components.critic, self.algorithm_spec
        updated = {} if critic is None else critic.update(batches, algorithm_spec.value_loss)
        learnt: Metrics = {f"critic/{name}": value for name, value in updated.items()}
        if step >= algorithm_spec.critic_warmup:
            learnt |= learnt_metrics(self.components.actor.update(batches, loss), algorithm_spec.sampling.cut)
        return learnt

    def publish(self) -> None:
        with self.components.generator.resident():
            weights = self.components.actor.publish()
            self.components.generator.load(weights)
        self.version = weights.version

    def adapt(self, experience: Experience) -> Metrics:
        """Reports the distance to the reference and moves its coefficient where that is adaptive."""
        if self.divergence is None:
            return {}
        self.divergence, told = self.divergence.after_step(experience.signals, experience.rollouts.mask)
        return told

    def remember(self, experience: Experience, gathered: CollectedBatch, step: int) -> Metrics:
        """Counts what became of the step's prompts, and keeps the groups that are worth seeing again."""
        self.prompts += gathered.counts
        of_run = {} if self.algorithm_spec.filtering is None else self.prompts.metrics()
        kept = {} if self.memory is None else self.memory.admit(experience, gathered.replayed, step)
        return gathered.metrics | of_run | kept

    # ---------------------------------------------------------------------------------- validation, stopping, going on
    def validate(self) -> float | None:
        """Validates, and returns the score that the best model is chosen by."""
        components = self.components
        if components.validation is None:
            return None
        looking = (
            components.actor
            if "attention_mass" in self.algorithm_spec.needs or self.algorithm_spec.attention_every
            else None
        )
        result = components.validation.run(components.generator, components.scorer, self.version, looking)
        components.tracker.validation(self.done, result.metrics, result.by, result.samples)
        return result.score

    def save(self, score: float | None = None) -> None:
        """Saves the last step. Between steps its state is the state of now; within one the source has moved on."""
        assert self.whole is not None, "an update has begun"
        snapshots = {name: each.snapshot() for name, each in self.kept().items()}
        self.components.store.save(self.done, snapshots, self.whole, score)
        self.saved = self.done

    def kept(self) -> dict[str, Stateful]:
        """All that changes from step to step, by its name in a checkpoint."""
        parts = self.components
        others = {"critic": parts.critic, "reference": parts.reference, "replay": self.memory, "ahead": self.ahead}
        return {"actor": parts.actor} | {name: each for name, each in others.items() if each is not None}

    def state(self) -> dict[str, Any]:
        """What the next step depends on besides the learners; all else is keyed by the step's number."""
        state = {"step": self.done, "source": self.components.source.state(), "prompts": asdict(self.prompts)}
        state |= {"divergence_coef": self.divergence and self.divergence.coef} | ({"ahead": True} if self.ahead else {})
        return state if self.memory is None else state | {"replay": len(self.memory.buffer.entries)}

    def restore(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        self.done = self.saved = state["step"]
        self.components.source.restore(state["source"])
        self.prompts = PromptCounts(**state.get("prompts", {}))
        if self.divergence is not None and self.divergence.adaptive and state["divergence_coef"] is not None:
            self.divergence = replace(self.divergence, coef=state["divergence_coef"])
        saved = {name: each for name, each in self.kept().items() if name not in OWN or name in state}
        self.components.store.restore(checkpoint, saved)
        self.whole = self.state()
        self.publish()
