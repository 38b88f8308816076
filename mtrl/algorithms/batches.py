"""From the credit of a step to the batches of its optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from mtrl.algorithms.losses import Loss, LossType, mismatch_correction, term_weights
from mtrl.algorithms.packing import optimizer_steps
from mtrl.types import Experience, TrainBatch


@dataclass(frozen=True)
class BatchPlan:
    """How a step is cut into optimizer steps, and what its sums are divided by."""

    prompts_per_update: int  # prompts in one optimizer step
    passes: int = 1  # how often a step learns from all its prompts (ppo_epochs)
    loss_type: LossType = "dapo"
    loss_token_denominator: Literal["all", "selected"] = "all"
    max_response_length: int = 1  # what dr_grpo divides by
    mask_truncated: bool = False


def assemble(plan: BatchPlan, loss: Loss, experience: Experience, key: tuple[int, int]) -> Iterator[TrainBatch]:
    """One batch for each optimizer step: whole groups, with weights whose denominators span the batch. Which groups
    meet in a batch is drawn anew in each pass, by the `key` (seed, step)."""
    rollouts, signals, credit = experience.rollouts, experience.signals, experience.credit
    assert credit is not None, "batches are made of credit"
    correction = None
    if signals.old_logprobs is not None:
        correction = mismatch_correction(
            signals.old_logprobs, rollouts.rollout_logprobs, rollouts.mask, loss.tis_clip, loss.tis_level
        )
    silenced = rollouts.truncated if plan.mask_truncated else torch.zeros(len(rollouts), dtype=torch.bool)
    for epoch in range(plan.passes):
        for rows in optimizer_steps(rollouts.group, plan.prompts_per_update, (*key, "minibatches", epoch)):
            weights = term_weights(
                credit.token_weight[rows],
                credit.keep_mask[rows],
                plan.loss_type,
                plan.max_response_length,
                plan.loss_token_denominator,
                silenced[rows],
            )
            yield TrainBatch(
                rollouts=rollouts.rows(rows),
                old_logprobs=None if signals.old_logprobs is None else signals.old_logprobs[rows],
                advantage=credit.advantage[rows],
                correction=None if correction is None else correction[rows],
                weights=weights,
                ref_logprobs=None if signals.ref_logprobs is None else signals.ref_logprobs[rows],
                returns=None if experience.returns is None else experience.returns[rows],
                values=None if signals.values is None else signals.values[rows],
            )
