"""The view `counterfactual(z)` against plain forwards of transformers with its attention by definition, in float64:
log-probs and gradients, for any layout and any cut into passes."""

import copy
from functools import lru_cache

import pytest
import torch
from counterfactual_rows import counterfactual_log_probs
from helpers import close, same, slow_but
from tiny_models import VISION_FAMILIES, fresh_backbone, get_encoder, plain_model, prompts_for, random_rollouts

from mtrl.models import counterfactual
from mtrl.models.backbone import Backbone
from mtrl.models.forward import Forward
from mtrl.types import Needs

pytestmark = pytest.mark.pairwise("family", "route", "z")

GROUP, LENGTHS = [0, 0, 1, 3, 2, 1, 3], [6, 2, 4, 1, 3, 6, 5]
TEMPERATURE = 0.8
ROUTES = {
    "shared prefix": {"share_prefix": True},
    "a row each": {"share_prefix": False},
    "shared and packed": {"share_prefix": True, "packed": True},
}


@pytest.fixture(params=VISION_FAMILIES)
def family(request):
    return request.param


@lru_cache
def rollouts_of(family):
    return random_rollouts(prompts_for(family), GROUP, LENGTHS)


@lru_cache
def expected(family, z):
    """[N, T] log-probs, and the gradient of the sum of their squares by name."""
    rollouts, model, rows = rollouts_of(family), in_float64(copy.deepcopy(plain_model(family))), []
    for row, g in enumerate(GROUP):
        response = rollouts.tokens[row, : LENGTHS[row]]
        options = {"temperature": TEMPERATURE, "model": model}
        found = counterfactual_log_probs(family, rollouts.prompts[g], response, z, **options)
        logp = found[torch.arange(len(response)), response]
        logp.square().sum().backward()
        rows.append(torch.nn.functional.pad(logp.detach(), (0, max(LENGTHS) - LENGTHS[row])))
    return torch.stack(rows), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def in_float64(model):
    """Experts one after the other: torch's grouped product takes no float64."""
    if model.config.model_type.endswith("moe"):
        model.set_experts_implementation("eager")
    return model.double()


def make_forward(family, **route):
    return Forward(Backbone(in_float64(fresh_backbone(family).model)), get_encoder(family), TEMPERATURE, **route)


def views_of(rollouts, z):
    return {f"counterfactual({z:g})": [prompt.media for prompt in rollouts.prompts]}


def measure(forward, rollouts, z):
    needs = Needs(f"logprobs@counterfactual({z:g})")
    return forward.signals(rollouts, needs, views_of(rollouts, z)).extra[f"logprobs@counterfactual({z:g})"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("z", slow_but([0.0, 1.0, 2.0], 1.0))
def test_log_probs_and_gradients_are_those_of_plain_rows(family, route, z, monkeypatch):
    monkeypatch.setattr(counterfactual, "CELLS_AT_ONCE", 600)  # several pieces per document
    forward, rollouts, name = (
        make_forward(family, **ROUTES[route]),
        rollouts_of(family),
        f"logprobs@counterfactual({z:g})",
    )
    logp, gradients = expected(family, z)
    prepared = forward.prepare(rollouts, views_of(rollouts, z))
    original, *others = forward.view_states(rollouts, prepared=prepared)
    found = forward.compare_views(original, others, rollouts, Needs(name))[name]
    torch.testing.assert_close(found.detach(), logp[rollouts.mask], rtol=1e-5, atol=1e-5)
    found.square().sum().backward()
    ours = {name: p.grad for name, p in forward.backbone.model.named_parameters() if p.grad is not None}
    assert ours.keys() == gradients.keys()
    largest = max(float(each.abs().max()) for each in gradients.values())
    for name, gradient in gradients.items():
        assert float((ours[name] - gradient).abs().max()) < 1e-5 * largest, name


@pytest.mark.parametrize("route", ROUTES)
def test_any_cut_into_passes_measures_the_same(family, route):
    forward, rollouts = make_forward(family, **ROUTES[route]), rollouts_of(family)
    whole = measure(forward, rollouts, 1.0)
    for rows in ([0], [1, 4], [2, 3, 5, 6]):
        part = rollouts.rows(torch.tensor(rows))
        close(measure(forward, part, 1.0), whole[rows][:, : part.mask.shape[1]], atol=1e-5)


def test_it_changes_rows_with_an_image_alone(family):
    forward, rollouts = make_forward(family), rollouts_of(family)
    other, clean = measure(forward, rollouts, 1.0), forward.signals(rollouts).old_logprobs
    text = ~rollouts.visual
    same(other[text], clean[text])
    assert (other - clean)[~text].abs().max() > 1e-3, "the view changes something"
    close(measure(forward, rollouts, 99.0), clean, atol=1e-5)  # nothing is so far above the mean


def test_the_images_are_encoded_once(family, monkeypatch):
    forward, rollouts, asked = make_forward(family), rollouts_of(family), []
    encode = forward.backbone.encode_images
    monkeypatch.setattr(forward.backbone, "encode_images", lambda inputs: asked.append(len(inputs)) or encode(inputs))
    measure(forward, rollouts, 1.0)
    assert asked == [len(rollouts.prompts)]


def test_other_attention_is_refused():
    backbone = fresh_backbone("qwen2_5_vl")
    backbone.language_model.config._attn_implementation = "eager"
    with pytest.raises(ValueError, match="reads or changes attention needs attn_implementation auto or sdpa"):
        measure(Forward(backbone, get_encoder("qwen2_5_vl")), rollouts_of("qwen2_5_vl"), 2.0)
