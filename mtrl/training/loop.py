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
from mtrl.protocols import Actor, Critic, Generator, Prober, Refreshed, Scorer, Stateful, Store, TaskSource, Tracker
from mtrl.training.algorithm_spec import Recipe, due
from mtrl.training.clock import Clock
from mtrl.training.collect import Gathering, with_maps
from mtrl.training.dynamic_sampling import Gathered, PromptCounts
from mtrl.training.off_policy import OWN, Ahead
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
    reference: Refreshed | None = None  # where it does not stay what it was
    stop: Callable[[], bool] = lambda: False  # whether somebody asked the run to stop
    critic: Critic | None = None  # where advantages need one; it is among the probers too
    devices: int = 1  # processes that compute


class Loop:
    def __init__(self, components: Components, recipe: Recipe) -> None:
        self.components, self.recipe = components, recipe
        self.divergence = recipe.divergence  # its coefficient may adapt
        self.prompts = PromptCounts()  # what became of all that were asked
        self.memory = None if recipe.replay is None else ReplayMemory(recipe.replay, recipe.seed)
        self.ahead = (
            Ahead(lambda: self.done) if recipe.off_policy_steps else None
        )  # what a step learns from, sampled before it
        self.version, self.done, self.saved = 0, 0, 0  # version of the weights; steps done; the last one saved
        self.whole: dict[str, Any] | None = None  # the state after the last step; None once an update has begun
        self.clock = Clock()

    def run(self) -> None:
        """Runs to the last step, or until asked to stop. Logs count the steps that are done: 0 is before training."""
        components, recipe = self.components, self.recipe
        if recipe.validate_first:
            self.validate()
        for step in range(self.done, recipe.total_steps):
            components.tracker.metrics(step + 1, self.step(step))
            last = self.done == recipe.total_steps
            score = self.validate() if last or due(self.done, recipe.validate_every) else None
            stop = components.stop()
            if last or stop or due(self.done, recipe.save_every) or components.store.is_best(score):
                self.save(score)
            if stop:
                return

    def step(self, step: int) -> Metrics:
        components, recipe = self.components, self.recipe
        self.clock = clock = Clock()
        gathered = self.gather(step)
        with clock("credit"):
            experience = self.give_credit(gathered.experience, step)
            loss = recipe.loss.with_divergence(self.divergence)
            batches = list(assemble(recipe.batches, loss, experience, (recipe.seed, step)))
        shown = with_maps(experience, components.actor, recipe.maps_per_step, step, clock)
        with clock("update"):
            self.whole = None
            learnt = self.learn(batches, loss, step)
        if self.ahead is not None:
            self.ahead.settle()
        with clock("publish"):
            self.publish()
        adapted = self.adapt(gathered.own) | self.remember(experience, gathered, step)
        self.done = step + 1
        if components.reference is not None and due(self.done, recipe.sync_ref_every):
            components.reference.refresh()
        self.whole = self.state()  # from here on an error costs nothing of this step
        components.tracker.rollouts(step + 1, shown)
        values = step_metrics(gathered.own, recipe.sampling.cut) | credit_metrics(recipe.credit, experience)
        values |= learnt | value_metrics(experience) | adapted | components.source.metrics()
        return values | clock.metrics(int(experience.rollouts.mask.sum()), len(experience), components.devices)

    # ------------------------------------------------------------------------------------------- the verbs of a step
    def gather(self, step: int) -> Gathered:
        """Responses, what was measured of them and what they earned: all that a step learns from."""
        of = self.components
        way = Gathering(of.source, of.generator, of.scorer, of.probers, self.recipe, step, self.version, self.clock)
        return way.run(self.memory) if self.ahead is None else self.ahead.run(way, self.memory)

    def give_credit(self, experience: Experience, step: int) -> Experience:
        """Turns rewards into advantages, and decides what each token gets of them."""
        penalty = None if self.divergence is None else self.divergence.reward_penalty(experience.signals)
        advantage, returns = self.recipe.estimator.estimate(experience, penalty)
        experience = replace(experience, advantage=advantage, returns=returns)
        return replace(experience, credit=assign(self.recipe.credit, experience, (self.recipe.seed, step)))

    def learn(self, batches: Sequence[TrainBatch], loss: Loss, step: int) -> Metrics:
        """A critic learns at every step, the actor from where the critic's warm-up ends."""
        critic, recipe = self.components.critic, self.recipe
        updated = {} if critic is None else critic.update(batches, recipe.value_loss)
        learnt: Metrics = {f"critic/{name}": value for name, value in updated.items()}
        if step >= recipe.critic_warmup:
            learnt |= learnt_metrics(self.components.actor.update(batches, loss), recipe.sampling.cut)
        return learnt

    def publish(self) -> None:
        with self.components.generator.awake():
            weights = self.components.actor.publish()
            self.components.generator.load(weights)
        self.version = weights.version

    def adapt(self, experience: Experience) -> Metrics:
        """Reports the distance to the reference and moves its coefficient where that is adaptive."""
        if self.divergence is None:
            return {}
        self.divergence, told = self.divergence.after_step(experience.signals, experience.rollouts.mask)
        return told

    def remember(self, experience: Experience, gathered: Gathered, step: int) -> Metrics:
        """Counts what became of the step's prompts, and keeps the groups that are worth seeing again."""
        self.prompts += gathered.counts
        of_run = {} if self.recipe.filtering is None else self.prompts.metrics()
        kept = {} if self.memory is None else self.memory.admit(experience, gathered.replayed, step)
        return gathered.metrics | of_run | kept

    # ---------------------------------------------------------------------------------- validation, stopping, going on
    def validate(self) -> float | None:
        """Validates, and returns the score that the best model is chosen by."""
        components = self.components
        if components.validation is None:
            return None
        looking = components.actor if "attention_mass" in self.recipe.needs or self.recipe.attention_every else None
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
