"""Loss terms with gradients through another view of the image equal plain torch on all logits in float64, for any
layout."""

import copy
import math
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch
from counterfactual_rows import counterfactual_log_probs
from test_full_divergence import EXACT, LAYOUTS, TEMPERATURE, silent
from tiny_models import fresh_backbone, get_encoder, plain_log_probs, plain_model
from update_helpers import difference, full_batch, learn, make_actor

from mtrl.algorithms.loss_terms.cfpo import Cfpo
from mtrl.algorithms.loss_terms.papo import Papo
from mtrl.algorithms.losses import Loss, LossTerm
from mtrl.models.backbone import Backbone
from mtrl.models.forward import Forward
from mtrl.models.views import standard_deviations
from mtrl.types import Needs

pytestmark = pytest.mark.pairwise("family", "layout", "term")

STEP = 3
VIEWS = ("black", "pixelated(8)")


@dataclass(frozen=True)
class Everything(LossTerm):
    """Every quantity, of two views."""

    live_needs = Needs(
        "logprobs@black", "jsd@black", "jsd_top100@pixelated(8)", "kl@black", "reverse_kl@pixelated(8)",
        "entropy@pixelated(8)",
    )  # fmt: skip

    def term(self, logp, signals):
        parts = [signals[name] for name in sorted(self.live_needs.names)]
        return sum(number * part for number, part in enumerate(parts, 1)) + logp * signals["logprobs@black"]


TERMS = {
    "papo": Papo(gamma=0.5, entropy_coef=0.1, masked_entropy_coef=0.2, both_views=True),
    "cfpo": Cfpo(coef=0.5, entropy_coef=0.1, threshold=1.0, both_views=True),
    "everything": Everything(),
}


def quantities(p, q, tokens):
    """Of two [T, V] log-probs, by their definitions; of the allowed tokens, since the gradient of inf - inf is NaN."""
    rows, allowed = torch.arange(len(tokens)), p[0] > -math.inf
    ours, theirs = p[:, allowed], q[:, allowed]
    kl = lambda a, b: (a.exp() * (a - b)).sum(-1)  # noqa: E731
    top = ours.topk(100).indices
    return {
        "logprobs": q[rows, tokens],
        "kl": kl(ours, theirs),
        "reverse_kl": kl(theirs, ours),
        "jsd": jsd(ours, theirs),
        "jsd_top100": jsd(group_others(ours, top), group_others(theirs, top)),
        "entropy": -(theirs.exp() * theirs).sum(-1),
    }


def jsd(ours, theirs):
    middle = (ours.exp() / 2 + theirs.exp() / 2).log()
    return sum((each.exp() * (each - middle)).sum(-1) for each in (ours, theirs)) / 2


def group_others(log_probs, top):
    """Those of the top tokens, and of all others as one."""
    chosen = log_probs.gather(-1, top).exp()
    return torch.cat([chosen, 1 - chosen.sum(-1, keepdim=True)], -1).log()


def make_live_actor(family, layout="all rows"):
    batching, packed = LAYOUTS[layout]
    settings = {"temperature": TEMPERATURE, "share_prefix": batching.share_prefix, "packed": packed}
    policy = Forward(Backbone(fresh_backbone(family).model.double()), get_encoder(family), **settings)
    return make_actor(family, batching, policy, max_grad_norm=math.inf)


def live_batch(family):
    return replace(
        silent(full_batch(family)), step=STEP, signals={"visual": full_batch(family).rollouts.visual[:, None]}
    )


@lru_cache
def plain_gradients(family, name):
    """Row by row through transformers, with all logits under each view: the loss, and its gradient by name."""
    batch, term, model = live_batch(family), TERMS[name], copy.deepcopy(plain_model(family)).double()
    rollouts, views, total = batch.rollouts, make_live_actor(family).views, 0.0
    for row, g in enumerate(rollouts.group.tolist()):
        tokens, prompt = rollouts.tokens[row][rollouts.mask[row]], rollouts.prompts[g]
        if not len(tokens):
            continue
        options = {"temperature": TEMPERATURE, "model": model}
        p, signals = plain_log_probs(family, prompt, tokens, **options), {"visual": rollouts.visual[row]}
        for view in term.live_needs.other_views:
            if (z := standard_deviations(view)) is None:
                q = plain_log_probs(family, prompt, tokens, view=views.media(view, prompt, STEP), **options)
            else:
                q = counterfactual_log_probs(family, prompt, tokens, z, **options)
            signals |= {f"{each}@{view}": values for each, values in quantities(p, q, tokens).items()}
        values = term.term(p[torch.arange(len(tokens)), tokens], signals)
        total = total + (batch.weights.token[row, : len(tokens)] * values).sum()
    total.backward()
    return float(total.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("term", TERMS)
def test_the_gradient_is_that_of_plain_torch(family, layout, term):
    value, gradients = plain_gradients(family, term)
    actor = make_live_actor(family, layout)
    found = learn(actor, [live_batch(family)], Loss(terms=(TERMS[term],)))
    assert found.metrics[f"{term}_loss"] == pytest.approx(value, rel=1e-6) and abs(value) > 1e-2
    ours = dict(zip(actor.learner.names.values(), found.gradients[0], strict=True))
    assert gradients.keys() == {name for name, gradient in ours.items() if gradient is not None}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert difference([ours[name] for name in gradients], gradients.values()) < EXACT * largest


def test_gradients_flow_through_both_views(family):
    """Without the other view's the gradient is another."""
    found = [
        learn(make_live_actor(family), [batch], Loss(terms=(term,))).gradients[0]
        for batch, term in ((live_batch(family), TERMS["papo"]), detached_batch(family))
    ]
    largest = max(float(gradient.abs().max()) for gradient in found[0])
    assert difference(*found) > 1e-2 * largest


def detached_batch(family):
    batch, actor = live_batch(family), make_live_actor(family)
    masked = actor.probe(batch.rollouts, Needs("perturbed_logprobs"), STEP).perturbed_logprobs
    return replace(batch, signals={**batch.signals, "perturbed_logprobs": masked}), Papo(0.5, 0.1)


def test_a_view_needs_a_step(family):
    with pytest.raises(AssertionError, match="a step keys the views"):
        learn(make_live_actor(family), [replace(live_batch(family), step=None)], Loss(terms=(TERMS["papo"],)))
