"""Loss terms: PAPO's against its formula and a plain gradient, the streams that terms read, and terms of users."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from helpers import close, fake_batch, fake_experience, fake_rollouts, random_cases, slow_but
from run_helpers import get_run_dir, read_metrics, tiny_arguments
from tiny_models import checkpoint

from mtrl.algorithms.batches import BatchPlan, assemble
from mtrl.algorithms.loss_terms import LOSS_TERMS
from mtrl.algorithms.loss_terms.papo import Papo
from mtrl.algorithms.losses import Loss, LossTerm, total_loss
from mtrl.cli import main
from mtrl.types import Credit, Needs, Signals
from mtrl.utils.errors import RunError


def papo_by_definition(logp, masked, visual, gamma, entropy_coef):
    """[N, T] in numpy."""
    x = np.clip(masked - logp, -20, 20)
    k3 = np.minimum(np.expm1(x) - x, 10.0)
    return -gamma * np.where(visual[:, None], k3, 0.0) - entropy_coef * logp


def test_papo_by_hand():
    # x = log 2: k3 = 2 - 1 - log 2 = .3069; x = 3: 16.1, held at 10. Both times -gamma, and -.1 log-prob.
    logp, masked = torch.tensor([[-1.0, -3.0]]), torch.tensor([[-1 + math.log(2), 0.0]])
    signals = {"perturbed_logprobs": masked, "visual": torch.tensor([[True]])}
    found = Papo(gamma=0.5, entropy_coef=0.1).term(logp, signals)
    close(found, [[-0.5 * (1 - math.log(2)) + 0.1, -5 + 0.3]])
    text = Papo(gamma=0.5).term(logp, signals | {"visual": torch.tensor([[False]])})
    assert not text.any()
    settings = {"gamma": 0.01, "entropy_coef": 0.0, "masked_entropy_coef": 0.0, "both_views": False}
    assert vars(LOSS_TERMS.make("papo")) == settings


def test_papo_with_both_views_by_hand():
    """The same, with -.2 times the log-prob under the masked image; nothing of it without an image."""
    logp, masked = torch.tensor([[-1.0, -3.0]]), torch.tensor([[-1 + math.log(2), 0.0]])
    papo, signals = (
        Papo(0.5, 0.1, 0.2, both_views=True),
        {"logprobs@perturbed": masked, "visual": torch.tensor([[True]])},
    )
    close(papo.term(logp, signals), [[-0.5 * (1 - math.log(2)) + 0.1 + 0.2 * (1 - math.log(2)), -5 + 0.3]])
    close(papo.term(logp, signals | {"visual": torch.tensor([[False]])}), [[0.1, 0.3]])
    assert papo.needs == Needs() and papo.live_needs == Needs("logprobs@perturbed")
    with pytest.raises(ValueError, match="both_views=true"):
        Papo(masked_entropy_coef=0.1)


@random_cases
def test_papo_by_definition(dice):
    shape = tuple(dice.integers(1, 7, 2))
    kinds = [
        lambda: -dice.gamma(0.5, 2.0, shape),
        lambda: np.full(shape, -0.3),
        lambda: dice.choice([0.0, -60.0], shape),
    ]
    logp, masked = (kinds[dice.integers(3)]() for _ in range(2))
    visual, gamma, coef = dice.random(shape[0]) < 0.7, float(dice.choice([0.01, 2.0])), float(dice.choice([0.0, 0.03]))
    signals = {"perturbed_logprobs": torch.tensor(masked), "visual": torch.tensor(visual)[:, None]}
    leaf = torch.tensor(logp, requires_grad=True)
    found = Papo(gamma, coef).term(leaf, signals)
    np.testing.assert_allclose(
        found.detach(), papo_by_definition(logp, masked, visual, gamma, coef), rtol=1e-9, atol=1e-12
    )
    found.sum().backward()
    x = masked - logp
    inside = (np.abs(x) < 20) & (np.expm1(np.clip(x, -20, 20)) - x < 10) & visual[:, None]
    slope = np.where(inside, -gamma * (1 - np.exp(np.clip(x, -20, 20))), 0.0) - coef
    np.testing.assert_allclose(leaf.grad, slope, rtol=1e-9, atol=1e-12)


def make_experience():
    rollouts = fake_rollouts([3, 2, 1], group=[0, 0, 1], visual=[True, False])
    masked, old = -torch.rand(3, 3), -torch.rand(3, 3)
    signals = Signals(old_logprobs=old, perturbed_logprobs=masked, extra={"jsd@none": torch.rand(3, 3)})
    ones = torch.ones(3, 3)
    credit = Credit(ones, rollouts.mask, rollouts.mask.float(), torch.ones(3))
    return fake_experience(rollouts, signals, advantage=ones, credit=credit)


@dataclass(frozen=True)
class Divergent(LossTerm):
    needs = Needs("jsd@none")

    def term(self, logp, signals):
        return logp * signals["jsd@none"]


def test_a_term_is_averaged_over_the_tokens_of_the_optimizer_step():
    """With the mean over all tokens: of the first group, which has an image, and of both; slices only add up."""
    experience = make_experience()
    loss = replace(Loss(), terms=(Papo(gamma=0.3), Divergent()))
    (batch,) = assemble(BatchPlan(global_batch_size=2), loss, experience, (0, 0))
    assert {*batch.signals} == {"visual", "perturbed_logprobs", "jsd@none"}
    logp, mask = -torch.rand(3, 3, generator=torch.Generator().manual_seed(1)), batch.rollouts.mask
    total, metrics = total_loss(logp, batch, loss)
    plain, _ = total_loss(logp, batch, Loss())
    papo = papo_by_definition(logp.numpy(), batch.signals["perturbed_logprobs"].numpy(),
                              batch.signals["visual"][:, 0].numpy(), 0.3, 0.0)  # fmt: skip
    other = (logp * batch.signals["jsd@none"])[mask].mean()
    assert float(metrics["papo_loss"]) == pytest.approx(papo[mask].sum() / 6, rel=1e-5)
    assert float(metrics["divergent_loss"]) == pytest.approx(float(other), rel=1e-5)
    assert float(total - plain) == pytest.approx(float(metrics["papo_loss"] + metrics["divergent_loss"]), rel=1e-4)
    parts = [total_loss(logp[i : i + 1], batch.rows(torch.tensor([i])), loss)[0] for i in range(3)]
    close(sum(parts), total, atol=1e-6)


def test_terms_need_no_streams_where_there_are_none():
    (batch,) = assemble(BatchPlan(global_batch_size=2), Loss(), make_experience(), (0, 0))
    assert batch.signals == {}


def test_a_wrong_shape_ends_the_run():
    @dataclass(frozen=True)
    class Wrong(LossTerm):
        def term(self, logp, signals):
            return logp.sum()

    batch = fake_batch(fake_rollouts([2]), torch.zeros(1, 2), torch.ones(1, 2))
    with pytest.raises(RunError, match="loss term Wrong"):
        total_loss(torch.zeros(1, 2), batch, replace(Loss(), terms=(Wrong(),)))


def test_papo_trains(tmp_path):
    words = ("training.max_steps=3", "training.val_freq=-1", "optimization.loss_terms=[{name: papo, gamma: 0.02}]",
             "worker.actor.ppo_epochs=2", f"worker.actor.model.model_path={checkpoint('qwen3_vl')}")  # fmt: skip
    assert main(tiny_arguments(tmp_path, *words)) == 0
    rows = read_metrics(get_run_dir(tmp_path))
    assert all(rows[step, False]["actor/papo_loss"] < 0 for step in (1, 2, 3)), "the difference is maximised"


@pytest.mark.parametrize("family", slow_but(["qwen3_vl", "qwen2_5_vl", "qwen3_5"], "qwen3_vl"))
def test_papo_with_both_views_trains(family, tmp_path):
    term = "{name: papo, gamma: 0.02, both_views: true, masked_entropy_coef: 0.01}"
    words = ("training.max_steps=3", "training.val_freq=-1", f"optimization.loss_terms=[{term}]",
             f"worker.actor.model.model_path={checkpoint(family)}")  # fmt: skip
    assert main(tiny_arguments(tmp_path, *words)) == 0
    rows = read_metrics(get_run_dir(tmp_path))
    assert all(math.isfinite(rows[step, False]["actor/papo_loss"]) for step in (1, 2, 3))
    assert rows[1, False]["actor/papo_loss"] != rows[2, False]["actor/papo_loss"]


@pytest.mark.parametrize(
    ("needed", "message"),
    [("logprobs@blue", "there is no view blue"), ("entropy", "entropy cannot be computed in an update")],
)
def test_what_an_update_cannot_compute_is_refused(needed, message, tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(own_source().replace("needs = Needs('entropy@none')", f"live_needs = Needs('{needed}')"))
    assert main(tiny_arguments(tmp_path, f"optimization.loss_terms=['{file}:Quiet']")) != 0
    assert message in capsys.readouterr().err


def test_an_unknown_term_is_refused(tmp_path, capsys):
    assert main(tiny_arguments(tmp_path, "optimization.loss_terms=[papa]")) != 0
    assert "there is no loss term papa" in capsys.readouterr().err


def test_a_term_of_a_users_file_trains(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(own_source())
    words = ("training.max_steps=1", "training.val_freq=-1", f"optimization.loss_terms=['{file}:Quiet']")
    assert main(tiny_arguments(tmp_path, *words)) == 0
    assert "actor/quiet_loss" in read_metrics(get_run_dir(tmp_path))[1, False]


def own_source():
    return (
        "from dataclasses import dataclass\nfrom mtrl import LossTerm, Needs\n\n@dataclass(frozen=True)\n"
        "class Quiet(LossTerm):\n    needs = Needs('entropy@none')\n\n    def term(self, logp, signals):\n"
        "        return 0.1 * signals['entropy@none'] * logp\n"
    )
