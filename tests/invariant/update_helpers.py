"""Actors, batches for them, and the weights after an update, with real but tiny models."""

import math
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch
from helpers import fake_batch
from tiny_models import fresh_backbone, get_encoder, prompts_for, random_rollouts

from mtrl.algorithms.credit import assign
from mtrl.algorithms.credit.attention_weights import AttentionWeights
from mtrl.algorithms.credit.entropy_filter import EntropyFilter
from mtrl.algorithms.credit.perception_filter import PerceptionFilter
from mtrl.algorithms.credit.trajectory_scaling import TrajectoryScaling
from mtrl.algorithms.losses import Loss, Ppo, loss_weights, mismatch_correction
from mtrl.models.forward import Forward
from mtrl.models.perturb import Perturbation
from mtrl.models.views import ImageViews
from mtrl.types import Experience, Needs, Rewards, TrainBatch
from mtrl.workers.actor import LocalActor
from mtrl.workers.learner import OptimizerSettings
from mtrl.workers.micro_batches import MicroBatching

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
# Prompts with one image, none, several, one; the first group has four rows; row 7 is masked completely.
GROUP, LENGTHS, MASKED = [0, 0, 0, 0, 1, 1, 2, 2, 3, 3], [6, 2, 9, 5, 4, 1, 7, 3, 5, 5], 7
# Adam divides a gradient by its size plus 1e-8: with this clip norm, rounding noise stays below the 1e-8, and a weight
# still moves by about LR, a hundred times the tolerance.
LR, CLIP = 1e-4, 0.01
ALL_AT_ONCE = MicroBatching(rows=len(GROUP))
MIXED = torch.randperm(len(GROUP), generator=torch.Generator().manual_seed(1))  # row order that mixes the groups
SMALL, LARGE = 40, 180  # tokens: SMALL splits groups, LARGE joins them
LAYOUTS = {
    "a row each": MicroBatching(rows=1),
    "three rows": MicroBatching(rows=3),
    "small token budget": MicroBatching(tokens=SMALL),
    "large token budget": MicroBatching(tokens=LARGE),
    "the largest group's tokens": MicroBatching(),
    "all rows, prompts not shared": MicroBatching(rows=len(GROUP), share_prefix=False),
    "token budget, prompts not shared": MicroBatching(tokens=LARGE, share_prefix=False),
}
NEEDS = Needs(
    "old_logprobs", "entropy", "entropy_change", "dependency", "similarity", "layer_similarity", "attention_mass"
)


@lru_cache
def rollouts_for(family):
    rollouts = random_rollouts(prompts_for(family), GROUP, LENGTHS)
    rollouts.mask[MASKED] = False
    behaviour = torch.randn(rollouts.mask.shape, generator=torch.Generator().manual_seed(5))
    old = make_actor(family).probe(rollouts, Needs("old_logprobs"), 0).old_logprobs
    return replace(rollouts, rollout_logprobs=old + 0.5 * behaviour)


def make_actor(family, batching=ALL_AT_ONCE, forward=None, reference=None, dependency="low_var_kl", **optimization):
    settings = {"lr": LR, "warmup_steps": 0, "total_steps": 10, "max_grad_norm": CLIP} | optimization
    share = batching.share_prefix
    return LocalActor(
        forward
        or Forward(fresh_backbone(family), get_encoder(family), share_prefix=share, perception_estimator=dependency),
        OptimizerSettings(**settings),
        views=ImageViews(Perturbation(seed=3)),
        update_batching=batching,
        probe_batching=batching,
        encoder_files={},
        reference=reference,
    )


@lru_cache
def signals_for(family):
    return make_actor(family).probe(rollouts_for(family), NEEDS, 0)


def noise(like, seed, scale=1.0):
    return scale * torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))


def plain_batch(family):
    """A GRPO batch: one advantage per row, and old log-probs that differ enough for clipped ratios."""
    rollouts, signals = rollouts_for(family), signals_for(family)
    mask = rollouts.mask
    advantage = noise(mask[:, :1], 1).expand(mask.shape).where(mask, 0.0)
    return fake_batch(rollouts, signals.old_logprobs + noise(mask, 2, 0.3), advantage)


def full_batch(family, loss_type="grpo"):
    """A batch with everything: filters, trajectory scale, token weights in the mask, correction, reference."""
    rollouts, signals = rollouts_for(family), signals_for(family)
    rules = (
        PerceptionFilter(0.4),
        EntropyFilter(0.2),
        TrajectoryScaling(0.8, 2.0),
        AttentionWeights(token_weight_target="mask"),
    )
    advantage = noise(rollouts.mask[:, :1], 1).expand(rollouts.mask.shape)
    token_weights = noise(rollouts.mask, 4).exp().clamp(0.2, 3.0)
    nothing = torch.zeros(len(rollouts))
    rewards = Rewards(nothing, {}, nothing.bool(), token_weights=token_weights)
    credit = assign(rules, Experience(rollouts, rewards, signals, advantage), (0, 0))
    return TrainBatch(
        rollouts,
        signals.old_logprobs + noise(rollouts.mask, 2, 0.3),
        credit.advantage,
        mismatch_correction(signals.old_logprobs, rollouts.rollout_logprobs, rollouts.mask, 2.0, "token"),
        loss_weights(credit.token_weight, credit.keep_mask, loss_type, 16, "selected"),
        ref_logprobs=signals.old_logprobs + noise(rollouts.mask, 6, 0.5),
    )


FULL_LOSS = Loss(Ppo(), divergence="low_var_kl", divergence_coef=0.1, entropy_penalty_coef=0.06)


def learn(actor, batches, loss=FULL_LOSS):
    """Weights, gradients before each optimizer step, and metrics."""
    gradients = []
    hook = actor.learner.optimizer.register_step_pre_hook(
        lambda *_: gradients.append([None if p.grad is None else p.grad.clone() for p in actor.learner.parameters])
    )
    metrics = actor.update(batches, loss)
    hook.remove()
    return SimpleNamespace(weights=copy_weights(actor), gradients=gradients, metrics=metrics)


def copy_weights(actor):
    return {name: p.detach().clone() for name, p in actor.model.named_parameters()}


def difference(a, b):
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def check_equal(found, expected, weights=1e-6):
    """Adam and the clip hide the size of a gradient, so that is compared too (`grad_norm`)."""
    worst = difference(found.weights.values(), expected.weights.values())
    assert worst < weights, f"weights differ by {worst}"
    for ours, theirs in zip(found.gradients, expected.gradients, strict=True):
        worst = difference(ours, theirs)
        assert worst < 3e-7 * CLIP, f"gradients differ by {worst}"
    assert found.metrics.keys() == expected.metrics.keys() and expected.metrics["grad_norm"] > 10 * CLIP
    for name, value in expected.metrics.items():
        assert found.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def widened(batch, columns):
    """The same batch with more padding. What has no weight there may hold anything."""

    def wider(x, fill):
        return None if x is None else torch.nn.functional.pad(x, (0, columns), value=fill)

    rollouts, weights = batch.rollouts, batch.weights
    return replace(
        batch,
        rollouts=replace(rollouts, tokens=wider(rollouts.tokens, 7), mask=wider(rollouts.mask, False)),
        **{name: wider(getattr(batch, name), math.nan) for name in ("old_logprobs", "advantage", "ref_logprobs")},
        correction=wider(batch.correction, 9.0),
        weights=replace(weights, **{name: wider(weight, 0.0) for name, weight in vars(weights).items()}),
    )
