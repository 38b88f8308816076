"""A learner descends whatever loss it is handed: here one of values, by hand, on a model of a single weight."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import fake_batch, fake_rollouts
from torch import nn

from mtrl.errors import Diverged
from mtrl.workers.learner import Learner, OptimizerSettings
from mtrl.workers.micro_batches import MicroBatching

RETURNS = torch.tensor([1.0, 2.0, 6.0])  # of three rows


class OneWeight(nn.Module):
    """Its value of everything is w."""

    device = torch.device("cpu")

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))


def learner_of(rows=2, lr=0.5):
    settings = OptimizerSettings(lr=lr, warmup_steps=0, weight_decay=0.0, max_grad_norm=math.inf)
    return Learner(OneWeight(), settings, MicroBatching(rows=rows), name="critic", advice="Lower my.lr.")


def batch_of():
    zeros = torch.zeros(3, 1)
    return replace(fake_batch(fake_rollouts([1, 1, 1]), zeros, zeros), returns=RETURNS[:, None])


def value_loss(model, seen):
    """Half the squared distance to the returns, a third a row."""

    def loss(batch):
        assert model.training
        seen.append(len(batch))
        part = 0.5 * ((model.w - batch.returns) ** 2).sum() / len(RETURNS)
        return part, {"value_loss": part.detach()}

    return loss


@pytest.mark.parametrize(("rows", "slices"), [(1, [1, 1, 1]), (2, [2, 1]), (3, [3])])
def test_any_loss_in_any_slices(rows, slices):
    learner, seen = learner_of(rows), []
    metrics = learner.update([batch_of()], value_loss(learner.model, seen))
    assert seen == slices and not learner.model.training
    # (1 + 4 + 36) / 6; the gradient is the mean of w - return, -3; Adam's first step goes by the rate.
    assert metrics == pytest.approx({"value_loss": 41 / 6, "grad_norm": 3.0, "lr": 0.5, "skipped_steps": 0.0})
    assert learner.model.w.item() == pytest.approx(0.5) and (learner.version, learner.optimizer_step) == (1, 1)


def test_metrics_are_means_over_the_steps():
    learner = learner_of(lr=0.0)
    metrics = learner.update([batch_of(), batch_of(), batch_of()], value_loss(learner.model, []))
    assert metrics["value_loss"] == pytest.approx(41 / 6) and (learner.version, learner.optimizer_step) == (1, 3)


def test_what_is_not_finite_is_told_of_this_learner(caplog):
    learner = learner_of()

    def bad(batch):
        return learner.model.w * math.nan, {}

    learner.update([batch_of(), batch_of()], bad)
    assert learner.model.w.item() == 0 and "optimizer step 1 of the critic" in caplog.text
    with pytest.raises(Diverged, match=r"^3 optimizer steps in a row of the critic .* Lower my\.lr\.$"):
        learner.update([batch_of()], bad)
