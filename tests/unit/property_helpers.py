"""Random batches for properties that hold for every batch.

A `Step` is a random rollout batch with every tensor that a step has. `train_batch` applies all of algorithms/ to it:
advantages, S, filters, scaling, token weights, correction, loss weights.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from helpers import fake_experience, fake_rollouts
from hypothesis import strategies as st
from torch import Tensor

from mtrl.algorithms import advantages
from mtrl.algorithms.credit import Rule, assign
from mtrl.algorithms.credit.attention_weights import AttentionWeights
from mtrl.algorithms.credit.entropy_filter import EntropyFilter
from mtrl.algorithms.credit.perception_filter import PerceptionFilter
from mtrl.algorithms.credit.trajectory_scaling import TrajectoryScaling
from mtrl.algorithms.losses import POLICY_LOSSES, Loss, loss_weights, mismatch_correction, total_loss
from mtrl.algorithms.signals import pool_sizes, visual_dependency
from mtrl.types import SEGMENTS, Credit, Experience, Rollouts, Signals, TrainBatch
from mtrl.utils.record_rows import take_rows

MAX_LENGTH = 12


@dataclass(frozen=True)
class Step:
    rollouts: Rollouts
    rewards: Tensor  # [N]
    old: Tensor  # [N, T], like all the following
    perturbed: Tensor
    entropy: Tensor
    reference: Tensor
    behaviour: Tensor
    logp: Tensor
    mass: Tensor  # [N, T, 2]

    def rows(self, index: Tensor) -> Step:
        return take_rows(self, index)

    def widened(self, extra: int, fill: float) -> Step:
        """Adds padding, and writes `fill` wherever the mask is false."""
        mask = torch.nn.functional.pad(self.rollouts.mask, (0, extra))

        def widen(x: Tensor) -> Tensor:
            if x.ndim == 1:
                return x
            tail = x.new_full((len(x), extra, *x.shape[2:]), 0)
            return torch.cat([x, tail], 1).where(mask.reshape(*mask.shape, *[1] * (x.ndim - 2)), fill)

        streams = {f.name: widen(getattr(self, f.name)) for f in fields(self) if f.name != "rollouts"}
        rollouts = replace(self.rollouts, mask=mask, tokens=torch.nn.functional.pad(self.rollouts.tokens, (0, extra)))
        return Step(rollouts, **streams)


@st.composite
def steps(draw, min_rows=1, empty_rows=True):
    """Uneven groups in mixed order, some without an image, some rows with one token or none."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) >= min_rows))
    visual = draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    group = draw(st.permutations([g for g, size in enumerate(sizes) for _ in range(size)]))
    shortest = 0 if empty_rows else 1
    lengths = draw(st.lists(st.integers(shortest, 9), min_size=len(group), max_size=len(group)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rollouts = fake_rollouts(lengths, group, visual, width=max([*lengths, 1]))

    def stream(*shape, low=0.0, high=1.0):
        return low + (high - low) * torch.rand(*rollouts.mask.shape, *shape, generator=random)

    old = stream(low=-3)
    return Step(
        rollouts,
        rewards=torch.randint(0, 4, (len(group),), generator=random) / 2,  # with ties and constant groups
        old=old,
        perturbed=old + stream(low=-2, high=1),
        entropy=stream(high=2),
        reference=old + stream(low=-1),
        behaviour=old + stream(low=-1),
        logp=old + stream(low=-1),
        mass=stream(2, low=0.01),
    )


Rules = tuple[Rule, ...]
SWITCHES: Rules = (PerceptionFilter(0.4), EntropyFilter(0.2), TrajectoryScaling())
ALL_RULES: Rules = (*SWITCHES, AttentionWeights(token_weight_smooth_sigma=1.0))
MASK_RULES: Rules = (*SWITCHES, AttentionWeights(token_weight_target="mask"))
RULES = st.sampled_from([(), (PerceptionFilter(0.4),), ALL_RULES, MASK_RULES])
LOSSES = st.sampled_from(
    [
        Loss(POLICY_LOSSES.make(kind, {"importance_sampling_level": level}), penalty, 0.1, 0.06)
        for kind in ("ppo", "cispo", "sapo")
        for level in ("token", "sequence")
        for penalty in ("kl", "abs", "mse", "low_var_kl")
    ]
)
LOSS_TYPES = st.sampled_from(["grpo", "dapo", "bnpo", "dr_grpo"])
DENOMINATORS = st.sampled_from(["all", "selected"])


def make_signals(step: Step) -> Signals:
    dependency = visual_dependency(step.old, step.perturbed, step.rollouts.mask)
    mass = step.mass[:, :, None].expand(-1, -1, len(SEGMENTS), -1)
    return Signals(old_logprobs=step.old, dependency=dependency, entropy=step.entropy, attention_mass=mass)


def compute_weights(step: Step, rule: AttentionWeights) -> Tensor:
    sizes = pool_sizes(step.rollouts.prompts)[step.rollouts.group]
    return rule.weights(step.mass, sizes, step.rollouts.mask)


DECIDED = ("advantage", "keep_mask", "token_weight", "response_weight")  # credit without the weights, which are logged


def make_experience(step: Step) -> Experience:
    rollouts = step.rollouts
    advantage = advantages.grpo(step.rewards, rollouts.group, rollouts.mask)
    return fake_experience(rollouts, make_signals(step), advantage)


def assign_credit(step: Step, rules: Rules) -> Credit:
    return assign(rules, make_experience(step), (0, 0))


def train_batch(step: Step, rules: Rules, loss_type="dapo", denominator="all", silenced=None) -> TrainBatch:
    mask = step.rollouts.mask
    credit = assign_credit(step, rules)
    weights = loss_weights(credit.token_weight, credit.keep_mask, loss_type, MAX_LENGTH, denominator, silenced)
    correction = mismatch_correction(step.old, step.behaviour, mask, 2.0, "sequence")
    return TrainBatch(step.rollouts, step.old, credit.advantage, correction, weights, step.reference)


def teacher_loss(logp: Tensor, batch: TrainBatch, loss: Loss) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    logp = logp.detach().clone().requires_grad_()
    total, metrics = total_loss(logp, batch, loss)
    (grad,) = torch.autograd.grad(total, logp)
    return total.detach(), grad, metrics
