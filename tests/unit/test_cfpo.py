"""CFPO: its term by hand and by definition, the change of a layer's attention by definition, and runs with it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import close, fake_rollouts, random_cases
from run_helpers import get_run_dir, read_metrics, tiny_arguments
from test_loss_terms import papo_by_definition
from tiny_models import checkpoint

from mtrl.algorithms.loss_terms import LOSS_TERMS
from mtrl.algorithms.loss_terms.cfpo import Cfpo
from mtrl.cli import main
from mtrl.models import counterfactual
from mtrl.models.counterfactual import CounterfactualEditor, EditedDocument
from mtrl.models.document_mask import DocumentMask, MaskRule
from mtrl.models.layout import make_documents
from mtrl.models.masked_attention import AttentionLayer
from mtrl.models.views import View, standard_deviations
from mtrl.types import Needs

NAME = "logprobs@counterfactual(2)"


# ------------------------------------------------------------------------------------------------------------ the term
def test_by_hand():
    # x = log 2: 2 - 1 - log 2 = .3069; x = 3: 16.1, held at 10. Both times -.5, and -.1 log-prob.
    logp, other = torch.tensor([[-1.0, -3.0]]), torch.tensor([[-1 + math.log(2), 0.0]])
    signals = {NAME: other, "visual": torch.tensor([[True]])}
    for both_views in (False, True):
        cfpo = Cfpo(0.5, 0.1, both_views=both_views)
        close(cfpo.term(logp, signals), [[-0.5 * (1 - math.log(2)) + 0.1, -5 + 0.3]])
        close(cfpo.term(logp, signals | {"visual": torch.tensor([[False]])}), [[0.1, 0.3]])
        needs = [Needs(), Needs(NAME)]
        assert [cfpo.live_needs, cfpo.needs] == (needs[::-1] if both_views else needs)
    settings = {"coef": 0.02, "entropy_coef": 0.0, "threshold": 2.0, "both_views": False}
    assert vars(LOSS_TERMS.make("cfpo")) == settings
    assert Cfpo(threshold=1.5).needs == Needs("logprobs@counterfactual(1.5)")
    with pytest.raises(ValueError, match="a number of standard deviations"):
        Cfpo(threshold=-1.0)


@random_cases
def test_by_definition(dice):
    """The formula of PAPO; its gradient flows through both log-probs if both have one."""
    shape = tuple(dice.integers(1, 7, 2))
    kinds = [
        lambda: -dice.gamma(0.5, 2.0, shape),
        lambda: np.full(shape, -0.3),
        lambda: dice.choice([0.0, -60.0], shape),
    ]
    logp, other = (kinds[dice.integers(3)]() for _ in range(2))
    visual, coef, entropy = (
        dice.random(shape[0]) < 0.7,
        float(dice.choice([0.02, 2.0])),
        float(dice.choice([0.0, 0.03])),
    )
    leaves = [torch.tensor(each, requires_grad=True) for each in (logp, other)]
    found = Cfpo(coef, entropy).term(leaves[0], {NAME: leaves[1], "visual": torch.tensor(visual)[:, None]})
    wanted = papo_by_definition(logp, other, visual, coef, entropy)
    np.testing.assert_allclose(found.detach(), wanted, rtol=1e-9, atol=1e-12)
    found.sum().backward()
    x = np.clip(other - logp, -20, 20)
    inside = (np.abs(other - logp) < 20) & (np.expm1(x) - x < 10) & visual[:, None]
    slope = np.where(inside, -coef * (np.exp(x) - 1), 0.0)
    np.testing.assert_allclose(leaves[0].grad, -slope - entropy, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(leaves[1].grad, slope, rtol=1e-9, atol=1e-12)


# ------------------------------------------------------------------------------------------------------------ the view
def test_the_view_and_its_argument():
    assert View.parse("counterfactual(1.5)") == View("counterfactual", 1.5)
    assert standard_deviations("counterfactual(0)") == 0 and standard_deviations("noised(2)") is None
    needs = Needs("kl@counterfactual(2)", "jsd@none")
    assert needs.other_views == ("counterfactual(2)", "none") and needs.unshared_views == ("counterfactual(2)",)
    for wrong in ("counterfactual", "counterfactual(box)"):
        with pytest.raises(ValueError, match="there is no view"):
            View.parse(wrong)


def test_each_response_has_a_document():
    rollouts = fake_rollouts([1, 2, 1], group=[0, 0, 1], visual=[True, False])
    found = [(each.view, each.rows) for each in make_documents(rollouts, True, 3, counterfactual={1: 2.0})]
    assert found == [(0, (0, 1)), (0, (2,)), (1, (0,)), (1, (1,)), (2, (0, 1))]
    edited = make_documents(rollouts, True, 3, counterfactual={1: 2.0})
    assert [(each.image_view, each.prompt) for each in edited] == [(0, 0), (0, 1), (0, 0), (0, 0), (2, 0)]


def change_by_definition(query, key, value, is_vision, z, window):
    """[heads, S, D] that the view adds to the attention of one document, and the least distance of a cell to its
    limit."""
    heads, size, _ = query.shape
    groups, change, nearest = heads // len(key), np.zeros((heads, size, value.shape[2])), math.inf
    weights = np.zeros((heads, size, size))
    for head in range(heads):
        for q in range(size):
            visible = range(max(0, q - window + 1), q + 1)
            scores = np.array([query[head, q] @ key[head // groups, k] for k in visible])
            scores = np.exp(scores - scores.max())
            weights[head, q, visible] = scores / scores.sum()
    begins = [k for k in range(size) if is_vision[k] and not (k and is_vision[k - 1])]
    for begin in begins:
        end = next(k for k in range(begin, size) if not is_vision[k])
        cells = weights[:, end:, begin:end]
        valid = cells[cells > 1e-8]
        limit = valid.mean() + z * valid.std(ddof=1) if len(valid) > 1 else math.inf
        nearest = min([nearest, *np.abs(valid - limit)])
        for head, q, k in np.argwhere((cells > limit) & (cells > 1e-8)):
            own = value[head // groups]
            change[head, end + q] += cells[head, q, k] * (own[is_vision].mean() - own[begin + k])
    return change, nearest


@random_cases
def test_the_change_of_a_layer_by_definition(dice):
    runs, is_vision = dice.integers(1, 4), []
    for _ in range(runs):
        is_vision += [False] * dice.integers(0, 3) + [True] * dice.integers(1, 5)
    is_vision = np.array(is_vision + [False] * dice.integers(1, 6))
    size, before, behind = len(is_vision), int(dice.integers(0, 3)), int(dice.integers(0, 3))
    key_heads, groups, width, total = int(dice.integers(1, 3)), int(dice.integers(1, 4)), 3, before + size + behind
    sharpness, z = dice.choice([0.0, 0.5, 2.0, 30.0]), float(dice.choice([0.0, 0.5, 1.0, 2.0, 3.0]))
    window = int(dice.choice([2, 5, 99]))
    query, key, value = (dice.normal(size=(n, total, width)) for n in (key_heads * groups, key_heads, key_heads))
    query, value = sharpness * query, value * dice.choice([1.0, 1e4])
    own = slice(before, before + size)
    wanted, nearest = change_by_definition(query[:, own], key[:, own], value[:, own], is_vision, z, window)
    if nearest < 1e-7:
        return  # rounding decides
    layer, editor = make_layer(query, key), make_editor(is_vision, before, z, window)
    output = torch.tensor(dice.normal(size=(2, total, len(query), width)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counterfactual, "CELLS_AT_ONCE", int(dice.choice([1, 3 * size * len(query), 10**6])))
        found = editor.edit(layer, torch.tensor(np.stack([value, value])), output) - output
    assert not found[0].any() and not found[1, :before].any() and not found[1, own.stop :].any()
    np.testing.assert_allclose(found[1, own].transpose(0, 1), wanted, rtol=1e-7, atol=1e-9 * np.abs(value).max())


def make_layer(query, key):
    pair = [torch.tensor(np.stack([each, each])) for each in (query, key)]
    return AttentionLayer(SimpleNamespace(layer_idx=0), *pair, None, {"scaling": 1.0})


def make_editor(is_vision, before, z, window):
    """The document is in the second sequence."""
    mask = DocumentMask.from_rows(torch.tensor(is_vision)[None])
    vision = torch.tensor(is_vision).nonzero()[:, 0]
    starts, image = mask.image[0, vision].unique(return_inverse=True)
    after = (starts + image.bincount())[image]
    columns = slice(before, before + len(is_vision))
    document = EditedDocument(1, columns, int(after.min()), z, mask, vision, image, after, len(starts))
    return CounterfactualEditor([document], [MaskRule(window)])


# ------------------------------------------------------------------------------------------------------------- in a run
@pytest.mark.parametrize("both_views", ["false", "true"])
def test_it_trains(both_views, tmp_path):
    term = f"{{name: cfpo, coef: 0.02, threshold: 1, both_views: {both_views}}}"
    words = ("training.max_steps=3", "training.val_freq=-1", f"optimization.loss_terms=[{term}]",
             "worker.actor.ppo_epochs=2", f"worker.actor.model.model_path={checkpoint('qwen3_vl')}")  # fmt: skip
    assert main(tiny_arguments(tmp_path, *words)) == 0
    rows = read_metrics(get_run_dir(tmp_path))
    assert all(rows[step, False]["actor/cfpo_loss"] < 0 for step in (1, 2, 3)), "the difference is maximised"


@pytest.mark.parametrize("both_views", ["false", "true"])
def test_other_attention_is_refused_at_the_start(both_views, tmp_path, capsys):
    term, eager = f"[{{name: cfpo, both_views: {both_views}}}]", "worker.actor.model.attn_implementation=eager"
    words = (f"optimization.loss_terms={term}", "optimization.compute_attention_metrics=false", eager)
    assert main(tiny_arguments(tmp_path, *words)) != 0
    assert "eager lets nobody change attention, as the view counterfactual(2) does; set auto" in capsys.readouterr().err
