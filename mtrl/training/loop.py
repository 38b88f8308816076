"""THE loop: how a vision-language model learns, one step after the other.

    prompts -> responses -> rewards   (user code, in its sandbox, meanwhile)
                         -> signals   (what each token depends on: the image, its own certainty, the reference)
            -> advantages -> credit   (what each token deserves, decided here, before anything is split)
            -> update                 (the actor adds gradients; it never learns which algorithm this was)

Everything concrete stands behind `protocols.py` and is chosen by `build/`. A step is keyed by its number: prompts,
samples and perturbations of step k are the same whatever ran before, so a run can be repeated and resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mtrl.algorithms import advantages, metrics
from mtrl.algorithms.credit import CreditRule, assign, token_weights
from mtrl.algorithms.divergence import Penalty, adapt_coefficient, divergence
from mtrl.algorithms.losses import Loss, LossType, mismatch_correction, term_weights
from mtrl.algorithms.packing import optimizer_steps
from mtrl.protocols import Actor, Generator, Prober, Scorer, Store, TaskSource, Tracker
from mtrl.training.clock import Clock
from mtrl.training.evaluate import Validation
from mtrl.types import Credit, Needs, Rewards, Rollouts, Sampling, Signals, TrainBatch


@dataclass(frozen=True)
class Divergence:
    """How far from the reference costs how much, and where: in the reward or as a loss."""

    penalty: Penalty
    coef: float
    in_loss: bool = False
    adaptive: bool = False
    target: float = 6.0
    horizon: float = 10_000.0


@dataclass(frozen=True)
class Recipe:
    """The algorithm as values. `build/recipe.py` reads them off the config; nothing below looks at it."""

    total_steps: int
    prompts_per_step: int
    prompts_per_update: int  # per optimizer step
    passes: int  # over the prompts of a step (ppo_epochs)
    sampling: Sampling
    needs: Needs
    attention_every: int  # steps; 0: attention is never read
    estimator: Literal["grpo", "rloo", "reinforce_plus_plus"]
    scale_rewards: advantages.Scale
    gamma: float
    credit: CreditRule
    divergence: Divergence | None
    loss: Loss
    loss_type: LossType
    loss_token_denominator: Literal["all", "selected"]
    max_response_length: int  # what dr_grpo divides by
    mask_truncated: bool
    validate_every: int  # steps; -1: only at the end
    validate_first: bool
    save_every: int  # steps; -1: only at the end

    def needs_at(self, step: int) -> Needs:
        return replace(self.needs, mass=True) if due(step + 1, self.attention_every) else self.needs


@dataclass
class Components:
    """What the loop works with."""

    source: TaskSource
    generator: Generator
    scorer: Scorer
    probers: Sequence[Prober]  # the actor first
    actor: Actor
    tracker: Tracker
    store: Store
    validation: Validation | None
    stop: Callable[[], bool] = lambda: False  # whether somebody asked for the end


class Loop:
    def __init__(self, house: Components, recipe: Recipe) -> None:
        self.components, self.recipe = house, recipe
        self.divergence = recipe.divergence  # its coefficient may adapt
        self.version, self.done = 0, 0  # of the weights; steps

    def run(self) -> None:
        """To the last step, or until asked to stop. Steps in logs count what has been done: 0 is before training."""
        house, recipe = self.components, self.recipe
        if recipe.validate_first:
            self.validate()
        for step in range(self.done, recipe.total_steps):
            house.tracker.metrics(step + 1, self.step(step))
            self.done = step + 1
            last = self.done == recipe.total_steps
            score = self.validate() if last or due(self.done, recipe.validate_every) else None
            stop = house.stop()
            if last or stop or due(self.done, recipe.save_every) or house.store.is_best(score):
                house.store.save(self.done, house.actor.snapshot(), self.state(), score)
            if stop:
                return

    def step(self, step: int) -> metrics.Metrics:
        house, recipe, clock = self.components, self.recipe, Clock()
        with clock("generate"):
            prompts = house.source.take(recipe.prompts_per_step)
            rollouts = house.generator.generate(prompts, replace(recipe.sampling, step=step, version=self.version))
        pending = house.scorer.submit(rollouts, step)
        with clock("probe"):
            probes = [prober.probe(rollouts, recipe.needs_at(step), step) for prober in house.probers]
            signals = reduce(Signals.join, probes)
        with clock("reward"):
            rewards = pending.result(signals)
        with clock("credit"):
            penalty = self.penalty(signals)
            advantage = estimate(recipe, rewards, rollouts, penalty)
            weights = token_weights(recipe.credit, rewards.token_weights, rollouts, signals)
            credit = assign(recipe.credit, advantage, rollouts.mask, rollouts.visual, signals, weights)
            batches = list(assemble(recipe, rollouts, signals, credit))
        with clock("update"):
            learnt = house.actor.update(batches, self.loss())
        with clock("publish"):
            self.publish()
        house.tracker.rollouts(step + 1, rollouts, rewards, credit, signals)
        values = metrics.step_metrics(recipe.credit, rollouts, rewards, signals, credit, recipe.sampling.cut)
        values |= metrics.learnt_metrics(learnt, recipe.sampling.cut)
        values |= self.adapt(signals, rollouts)
        return values | clock.metrics(tokens=int(rollouts.mask.sum()), samples=len(rollouts))

    def publish(self) -> None:
        weights = self.components.actor.publish()
        self.components.generator.load(weights)
        self.version = weights.version

    def validate(self) -> float | None:
        """The score that the best model is chosen by."""
        if self.components.validation is None:
            return None
        looking = self.components.actor if self.recipe.attention_every else None
        result = self.components.validation.run(
            self.components.generator, self.components.scorer, self.version, looking
        )
        self.components.tracker.validation(self.done, result.metrics, result.by, result.samples)
        return result.score

    def state(self) -> dict[str, Any]:
        """What the next step depends on besides the actor; all else is keyed by the step's number."""
        coef = None if self.divergence is None else self.divergence.coef
        return {"step": self.done, "source": self.components.source.state(), "divergence_coef": coef}

    def restore(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        self.done = state["step"]
        self.components.source.restore(state["source"])
        if self.divergence is not None and self.divergence.adaptive and state["divergence_coef"] is not None:
            self.divergence = replace(self.divergence, coef=state["divergence_coef"])
        self.components.actor.restore(checkpoint)
        self.publish()

    # ----------------------------------------------------------------------------------------------------- divergence
    def penalty(self, signals: Signals) -> Tensor | None:
        """[N, T]: what the distance to the reference takes off the reward of each token."""
        rule = self.divergence
        if rule is None or rule.in_loss:
            return None
        return rule.coef * distance(rule, signals)

    def loss(self) -> Loss:
        rule = self.divergence
        if rule is None or not rule.in_loss:
            return self.recipe.loss
        return replace(self.recipe.loss, divergence=rule.penalty, divergence_coef=rule.coef)

    def adapt(self, signals: Signals, rollouts: Rollouts) -> metrics.Metrics:
        """Reports the distance to the reference and moves its coefficient where that is adaptive."""
        rule = self.divergence
        if rule is None:
            return {}
        kl = float(distance(rule, signals).where(rollouts.mask, 0.0).sum(1).double().mean())
        if rule.adaptive:
            coef = adapt_coefficient(rule.coef, kl, len(rollouts), rule.target, rule.horizon)
            self.divergence = replace(rule, coef=coef)
        return {"actor/kl_coef": rule.coef, "actor/reference_kl": kl}


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def distance(rule: Divergence, signals: Signals) -> Tensor:
    """[N, T]: of the policy before this step's updates to the reference."""
    if signals.divergence is not None:
        return signals.divergence
    assert signals.old is not None and signals.reference is not None
    return divergence(signals.old, signals.reference, rule.penalty)


def estimate(recipe: Recipe, rewards: Rewards, rollouts: Rollouts, penalty: Tensor | None) -> Tensor:
    """A [N, T]."""
    mask, group, total = rollouts.mask, rollouts.group, rewards.total
    if recipe.estimator == "reinforce_plus_plus":
        return advantages.reinforce_plus_plus(advantages.token_rewards(total, mask, penalty), mask, recipe.gamma)
    if penalty is not None:
        total = advantages.charge(total, penalty, mask)
    if recipe.estimator == "rloo":
        return advantages.rloo(total, group, mask)
    return advantages.grpo(total, group, mask, recipe.scale_rewards)


def assemble(recipe: Recipe, rollouts: Rollouts, signals: Signals, credit: Credit) -> Iterator[TrainBatch]:
    """One batch for each optimizer step: whole groups, with weights whose denominators span the batch."""
    old, clip, level = signals.old, recipe.loss.tis_clip, recipe.loss.tis_level
    correction = None if old is None else mismatch_correction(old, rollouts.behaviour, rollouts.mask, clip, level)
    silenced = rollouts.truncated if recipe.mask_truncated else torch.zeros(len(rollouts), dtype=torch.bool)
    for _ in range(recipe.passes):
        for rows in optimizer_steps(rollouts.group, recipe.prompts_per_update):
            weights = term_weights(
                credit.measure[rows],
                credit.select[rows],
                recipe.loss_type,
                recipe.max_response_length,
                recipe.loss_token_denominator,
                silenced[rows],
            )
            yield TrainBatch(
                rollouts.rows(rows),
                None if old is None else old[rows],
                credit.advantage[rows],
                None if correction is None else correction[rows],
                weights,
                None if signals.reference is None else signals.reference[rows],
            )
