"""Our losses and their gradients against TRL 1.16's, on the same log-probs.

TRL's loss is a method of its trainer. It is called here on a fake trainer with only the attributes that the method
reads, and gets the log-probs as a leaf, so that no model runs and the gradients of the log-probs can be compared.

How the two map onto each other:

    TRL                                    MTRL
    loss_type grpo, dapo, dr_grpo, bnpo    kind ppo, the loss type of that name (one batch: bnpo is dapo)
    cispo                                  kind cispo, aggregated as dapo; epsilon_high is `cispo_clip_high`, absolute
    sapo                                   kind sapo, aggregated as grpo
    delta                                  clip_ratio_dual (equal as long as delta > 1 + epsilon_high, as TRL demands)
    beta                                   divergence_coef with low_var_kl
    importance_sampling_ratio              correction
    mask_truncated_completions             silenced (equal at beta 0: TRL drops the KL of such rows too, we keep it)
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mtrl.algorithms.losses import POLICY_LOSSES, Loss, loss_weights, mismatch_correction, total_loss
from mtrl.types import Rollouts, TrainBatch

MAX_LENGTH = 9  # limit of a response; the longest here has 7 tokens, so dr_grpo's denominator is not a token count
LOW, HIGH, DUAL, CISPO_HIGH = 0.2, 0.28, 3.0, 1.5
TAU_POSITIVE, TAU_NEGATIVE = 1.2, 1.7
TIS_CLIP = 1.25

# In float64 the two differ only by the float32 loss weights; training uses float32.
TOLERANCE = {torch.float64: {"rtol": 1e-6, "atol": 1e-9}, torch.float32: {"rtol": 1e-6, "atol": 1e-6}}


@dataclass(frozen=True)
class Data:
    """Log-probs of 8 responses, 1 to 7 tokens long, with random values off the mask."""

    logp: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    ref_logprobs: Tensor
    advantage: Tensor  # [N, T]
    mask: Tensor

    def rows(self, index: slice) -> Data:
        return Data(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


def make_data(dtype: torch.dtype = torch.float64) -> Data:
    """Four log-ratio levels (below, within and above the clips, above the dual clip) for each sign of A."""
    draw = torch.Generator().manual_seed(5)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(8, 7, generator=draw, dtype=torch.float64)

    lengths = torch.tensor([7, 1, 4, 6, 2, 5, 7, 3])
    old = -noise(1.0).abs() - 0.1
    shift = torch.tensor([-0.7, 0.02, 0.6, 1.5, -0.7, 0.02, 0.6, 1.5], dtype=torch.float64)[:, None]
    advantage = torch.tensor([1.3, 0.4, 0.9, 1.7, -0.8, -1.1, -0.3, -1.9], dtype=torch.float64)[:, None].expand(8, 7)
    data = Data(
        logp=old + shift + noise(0.3),
        old_logprobs=old,
        rollout_logprobs=old + noise(0.3),
        ref_logprobs=old + noise(0.8),
        advantage=advantage,
        mask=torch.arange(7) < lengths[:, None],
    )
    return Data(**{name: value if name == "mask" else value.to(dtype) for name, value in vars(data).items()})


@dataclass(frozen=True)
class Setting:
    """One configuration, in TRL's terms."""

    loss_type: str = "grpo"
    level: str = "token"
    delta: float | None = None
    beta: float = 0.0
    correction: str | None = None  # None, "token" or "sequence"
    silenced: tuple[int, ...] = ()  # rows masked as truncated

    def __str__(self) -> str:
        return "-".join(f"{k}={v}" for k, v in vars(self).items() if v != getattr(Setting, k))


def trl_loss(setting: Setting, data: Data, micro_batches: int = 1, items: int | None = None) -> tuple[Tensor, Any]:
    """TRL's loss and metrics of these rows, as one of `micro_batches` of a step of `items` tokens."""
    mask = data.mask.long()
    mask[list(setting.silenced)] = 0
    gap = (data.old_logprobs - data.rollout_logprobs) * mask
    if setting.correction == "sequence":
        gap = gap.sum(1, keepdim=True)
    entropies = torch.zeros_like(data.old_logprobs)
    fake_trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (data.logp, entropies, None),
        loss_type=setting.loss_type,
        importance_sampling_level=setting.level,
        beta=setting.beta,
        epsilon_low=LOW,
        epsilon_high=CISPO_HIGH if setting.loss_type == "cispo" else HIGH,
        max_completion_length=MAX_LENGTH,
        args=SimpleNamespace(
            delta=setting.delta,
            use_bias_correction_kl=False,
            sapo_temperature_pos=TAU_POSITIVE,
            sapo_temperature_neg=TAU_NEGATIVE,
            steps_per_generation=micro_batches,
        ),
        current_gradient_accumulation_steps=micro_batches,
        use_vllm=setting.correction is not None,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    nothing = torch.zeros(len(mask), 0, dtype=torch.long)
    inputs = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": data.advantage,
        "old_per_token_logps": data.old_logprobs,
        "ref_per_token_logps": data.ref_logprobs,
        "importance_sampling_ratio": gap.exp().clamp(max=TIS_CLIP),
        "num_items_in_batch": mask.sum() if items is None else torch.tensor(items),
    }
    from trl.trainer.grpo_trainer import GRPOTrainer  # takes seconds: not while tests are collected

    loss = GRPOTrainer._compute_loss(fake_trainer, None, inputs)
    return loss, fake_trainer._metrics["train"]


def our_loss(setting: Setting, data: Data, index: slice = slice(None)) -> tuple[Tensor, dict[str, Tensor]]:
    """Our loss of the rows `index` of a step with all rows."""
    kind = setting.loss_type if setting.loss_type in ("cispo", "sapo") else "ppo"
    aggregation: Any = {"cispo": "dapo", "sapo": "grpo"}.get(setting.loss_type, setting.loss_type)
    rows = len(data.mask)
    silenced = torch.zeros(rows, dtype=torch.bool)
    silenced[list(setting.silenced)] = True
    batch = TrainBatch(
        rollouts=Rollouts(
            prompts=(None,),  # type: ignore[arg-type]  # the loss reads none
            group=torch.zeros(rows, dtype=torch.long),
            tokens=torch.zeros_like(data.mask, dtype=torch.long),
            mask=data.mask,
            rollout_logprobs=data.rollout_logprobs,
            text=("",) * rows,
            finish_reason=("stop",) * rows,
            version=torch.zeros(rows, dtype=torch.long),
        ),
        old_logprobs=data.old_logprobs,
        advantage=data.advantage,
        correction=mismatch_correction(
            data.old_logprobs,
            data.rollout_logprobs,
            data.mask,
            clip=TIS_CLIP if setting.correction else None,
            level="sequence" if setting.correction == "sequence" else "token",
        ),
        weights=loss_weights(data.mask.float(), data.mask, aggregation, MAX_LENGTH, silenced=silenced),
        ref_logprobs=data.ref_logprobs,
    )
    keys = {
        "importance_sampling_level": setting.level,
        "clip_ratio_low": LOW,
        "clip_ratio_high": HIGH,
        "clip_ratio_dual": setting.delta,
        "cispo_clip_high": CISPO_HIGH,
        "tau_positive": TAU_POSITIVE,
        "tau_negative": TAU_NEGATIVE,
    }
    policy = POLICY_LOSSES.make(kind, keys)
    return total_loss(data.logp[index], batch.rows(torch.arange(rows)[index]), Loss(policy, "low_var_kl", setting.beta))


def assert_agree(setting: Setting, data: Data) -> None:
    data = replace(data, logp=data.logp.clone().requires_grad_())
    theirs, _ = trl_loss(setting, data)
    ours, _ = our_loss(setting, data)
    (their_grad,) = torch.autograd.grad(theirs, data.logp)
    (our_grad,) = torch.autograd.grad(ours, data.logp)
    tolerance = TOLERANCE[data.logp.dtype]
    assert (their_grad[data.mask] != 0).sum() >= 5, "nothing to compare"
    torch.testing.assert_close(ours, theirs, **tolerance)
    torch.testing.assert_close(our_grad, their_grad, **tolerance)


LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo")
LEVELS = ("token", "sequence")
SETTINGS = [
    *(Setting(loss_type, level) for loss_type in LOSS_TYPES for level in LEVELS),
    *(Setting(loss_type, level, beta=0.3) for loss_type in LOSS_TYPES for level in LEVELS),
    *(Setting(loss_type, level, delta=DUAL) for loss_type in LOSS_TYPES[:4] for level in LEVELS),
    *(Setting(loss_type, correction=correction) for loss_type in LOSS_TYPES for correction in LEVELS),
    # A token's correction at the sequence level is where we part by design: TRL's shared ratio mixes the corrections of
    # a response's tokens in every gradient, ours keeps each with its token.
    *(Setting(loss_type, "sequence", correction="sequence") for loss_type in LOSS_TYPES),
    *(Setting(loss_type, silenced=(0, 5)) for loss_type in LOSS_TYPES),
    Setting("dapo", delta=DUAL, beta=0.3, correction="token"),
    Setting("grpo", "sequence", delta=DUAL, beta=0.3, correction="sequence"),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float64", "float32"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_loss_and_gradient(setting: Setting, dtype: torch.dtype) -> None:
    assert_agree(setting, make_data(dtype))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_advantages_that_differ_between_tokens(loss_type: str) -> None:
    data = make_data()
    per_token = data.advantage * torch.linspace(0.2, 1.8, 7, dtype=torch.float64)
    assert_agree(Setting(loss_type, beta=0.3), replace(data, advantage=per_token))


@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
def test_micro_batches_add_up_to_trls_step(loss_type: str) -> None:
    """TRL divides by the tokens of the whole step where the loss type is dapo or cispo; so do we, everywhere."""
    data, setting = make_data(), Setting(loss_type, beta=0.3)
    for index in (slice(0, 3), slice(3, 8)):
        part = replace(data.rows(index), logp=data.logp[index].clone().requires_grad_())
        theirs, _ = trl_loss(setting, part, micro_batches=2, items=int(data.mask.sum()))
        logp = data.logp.clone().requires_grad_()
        ours, _ = our_loss(setting, replace(data, logp=logp), index)
        torch.testing.assert_close(ours, theirs, **TOLERANCE[torch.float64])
        torch.testing.assert_close(
            torch.autograd.grad(ours, logp)[0][index],
            torch.autograd.grad(theirs, part.logp)[0],
            **TOLERANCE[torch.float64],
        )


def test_metrics() -> None:
    """Clip fractions and KL are means over valid tokens on both sides."""
    setting, data = Setting("dapo", beta=0.3), make_data()
    _, theirs = trl_loss(setting, data)
    _, ours = our_loss(setting, data)
    for name, their_name in {
        "clipfrac_low": "clip_ratio/low_mean",
        "clipfrac_high": "clip_ratio/high_mean",
        "divergence_loss": "kl",
    }.items():
        assert theirs[their_name][0] > 0
        assert ours[name].item() == pytest.approx(theirs[their_name][0], rel=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_the_data_reaches_every_branch(level: str) -> None:
    """Below, within and above the clips, above the dual and the cispo clip, for each sign of A; both sides of TIS."""
    data = make_data()
    log_ratio = data.logp - data.old_logprobs
    if level == "sequence":
        log_ratio = ((log_ratio * data.mask).sum(1) / data.mask.sum(1))[:, None].expand_as(log_ratio)
    region = torch.bucketize(log_ratio.exp(), torch.tensor([1 - LOW, 1 + HIGH, DUAL], dtype=torch.float64))
    for positive in (True, False):
        reached = region[data.mask & ((data.advantage > 0) == positive)].unique().tolist()
        assert reached == [0, 1, 2, 3]
    ratio = log_ratio.exp()[data.mask]
    assert (ratio > CISPO_HIGH).any() and (ratio < CISPO_HIGH).any()
    correction = (data.old_logprobs - data.rollout_logprobs).exp()[data.mask]
    assert (correction > TIS_CLIP).any() and (correction < 1).any()
    assert len(data.mask.sum(1).unique()) >= 4
