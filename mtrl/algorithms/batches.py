"""Splits the credit of a step into the batches of its optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mtrl.algorithms.groups import group_count, permutation
from mtrl.algorithms.losses import Loss, LossType, loss_weights, mismatch_correction
from mtrl.types import Experience, TrainBatch


@dataclass(frozen=True)
class BatchPlan:
    """How a step is split into optimizer steps, and how its losses are aggregated."""

    global_batch_size: int  # prompts in one optimizer step
    ppo_epochs: int = 1  # passes over the prompts of a step
    loss_type: LossType = "dapo"
    loss_token_denominator: Literal["all", "selected"] = "all"
    max_response_length: int = 1  # denominator of dr_grpo
    mask_truncated_responses: bool = False


def assemble(plan: BatchPlan, loss: Loss, experience: Experience, key: tuple[int, int]) -> Iterator[TrainBatch]:
    """One batch per optimizer step: whole groups, with loss weights whose denominators cover the batch. The `key`
    (seed, step) draws which groups share a batch, again in each pass."""
    rollouts, signals, credit = experience.rollouts, experience.signals, experience.credit
    assert credit is not None, "credit is assigned before batches are made"
    correction = None
    if signals.old_logprobs is not None:
        correction = mismatch_correction(
            signals.old_logprobs, rollouts.rollout_logprobs, rollouts.comparable, loss.tis_clip, loss.tis_level
        )
    streams = read_streams(loss, experience)
    silenced = rollouts.truncated if plan.mask_truncated_responses else torch.zeros(len(rollouts), dtype=torch.bool)
    for epoch in range(plan.ppo_epochs):
        for rows in optimizer_steps(rollouts.group, plan.global_batch_size, (*key, "minibatches", epoch)):
            weights = loss_weights(
                credit.token_weight[rows],
                credit.keep_mask[rows],
                plan.loss_type,
                plan.max_response_length,
                plan.loss_token_denominator,
                silenced[rows],
                None if rollouts.noised is None else rollouts.noised[rows],
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
                signals={name: values[rows] for name, values in streams.items()},
                step=key[1],
            )


def read_streams(loss: Loss, experience: Experience) -> dict[str, Tensor]:
    """What the loss terms read: their signals, and `visual` [N, 1], the responses that saw an image."""
    streams = {"visual": experience.rollouts.visual[:, None]} if loss.terms else {}
    for name in sorted({name for term in loss.terms for name in term.needs.names}):
        values = experience.signals.by_name(name)
        assert values is not None, f"the probe did not measure {name}, which a loss term needs"
        streams[name] = values
    return streams


def optimizer_steps(group: Tensor, prompts_per_step: int, key: Sequence[int | str] = ()) -> list[Tensor]:
    """Row indices of each optimizer step: whole groups, `prompts_per_step` per step, in an order drawn by the key
    (without one, in their own order). Rows of a step stay in order, so one step of all groups is the same for any key.
    """
    groups = group_count(group)
    order = permutation(groups, *key) if key else torch.arange(groups)
    parts = order.split(prompts_per_step) if groups else ()
    return [torch.nonzero(torch.isin(group, chosen)).flatten() for chosen in parts]
