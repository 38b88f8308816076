"""The view `counterfactual(z)` against a plain forward of transformers for each row, whose attention is replaced by the
definition, in float64: log-probs, gradients, any layout and any cut into passes."""

import copy
from functools import lru_cache

import pytest
import torch
from helpers import close, same
from tiny_models import VISION_FAMILIES, fresh_backbone, get_encoder, plain_inputs, plain_model, prompts_for, random_rollouts
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from mtrl.models import counterfactual
from mtrl.models.backbone import Backbone
from mtrl.models.forward import Forward
from mtrl.types import VISION_POOL, Needs

pytestmark = pytest.mark.pairwise("family", "route", "z")

GROUP, LENGTHS = [0, 0, 1, 3, 2, 1, 3], [6, 2, 4, 1, 3, 6, 5]
ROUTES = {
    "shared prefix": {"share_prefix": True},
    "a row each": {"share_prefix": False},
    "shared and packed": {"share_prefix": True, "packed": True},
}
HOOK, TEMPERATURE = "counterfactual_by_definition", 0.8
IMAGES = []  # of the row that is computed: the first and the last column of each, and z


def by_definition(module, query, key, value, attention_mask, *, scaling, **_):
    """Cell by cell, with the whole matrix."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    weights = (query @ key.transpose(2, 3) * scaling + attention_mask).softmax(-1)
    output, heads = weights @ value, range(query.shape[1])
    columns = [column for first, last, _ in IMAGES for column in range(first, last + 1)]
    for first, last, z in IMAGES:
        image = weights[0, :, last + 1 :, first : last + 1]
        valid = image.detach()[image.detach() > 1e-8]
        limit = valid.mean() + z * valid.std()
        for head in heads:
            average = value[0, head, columns].mean()
            chosen = image[head].where(image[head].detach() > limit, torch.zeros((), dtype=image.dtype))
            change = chosen @ (average - value[0, head, first : last + 1])
            rest = torch.zeros(1, query.shape[1], query.shape[2], value.shape[3], dtype=output.dtype)
            rest[0, head, last + 1 :] = change
            output = output + rest
    return output.transpose(1, 2), weights


AttentionInterface.register(HOOK, by_definition)
AttentionMaskInterface.register(HOOK, eager_mask)


@pytest.fixture(params=VISION_FAMILIES)
def family(request):
    return request.param


@lru_cache
def hooked_model(family):
    model = copy.deepcopy(plain_model(family)).double()
    text = fresh_backbone(family).family.find_language_model(model)
    text.config._attn_implementation = HOOK
    return model


def runs(vision):
    """First and last of each run of True."""
    marked = [False, *vision.tolist(), False]
    begins = [i for i in range(len(vision)) if marked[i + 1] and not marked[i]]
    ends = [i for i in range(len(vision)) if marked[i + 1] and not marked[i + 2]]
    return list(zip(begins, ends, strict=True))


def plain_row(family, prompt, response, z):
    """[length] log-probs with gradients."""
    encoder = get_encoder(family)
    IMAGES[:] = [(*ends, z) for ends in runs(prompt.token_pool == VISION_POOL)]
    logits = hooked_model(family)(**plain_inputs(encoder, prompt, response)).logits[0, len(prompt.ids) - 1 : -1]
    forbidden = torch.zeros(logits.shape[-1], dtype=torch.bool)
    forbidden[list(encoder.forbidden_ids)] = True
    log_probs = (logits / TEMPERATURE).masked_fill(forbidden, -torch.inf).log_softmax(-1)
    return log_probs[torch.arange(len(response)), response]


@lru_cache
def rollouts_of(family):
    return random_rollouts(prompts_for(family), GROUP, LENGTHS)


@lru_cache
def expected(family, z):
    """[N, T] log-probs, and the gradient of the sum of their squares by name."""
    rollouts, model, rows = rollouts_of(family), hooked_model(family), []
    model.zero_grad()
    for row, g in enumerate(GROUP):
        logp = plain_row(family, rollouts.prompts[g], rollouts.tokens[row, : LENGTHS[row]], z)
        logp.square().sum().backward()
        rows.append(torch.nn.functional.pad(logp.detach(), (0, max(LENGTHS) - LENGTHS[row])))
    return torch.stack(rows), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def make_forward(family, **route):
    return Forward(Backbone(fresh_backbone(family).model.double()), get_encoder(family), TEMPERATURE, **route)


def compute(forward, rollouts, z, live=False):
    """[M] of the view: of an update with gradients, or of a probe."""
    name = f"counterfactual({z:g})"
    views = {name: [prompt.media for prompt in rollouts.prompts]}
    if not live:
        return forward.signals(rollouts, Needs(f"logprobs@{name}"), views).extra[f"logprobs@{name}"]
    prepared, needs = forward.prepare(rollouts, views), Needs(f"logprobs@{name}")
    states, *others = forward.view_states(rollouts, prepared=prepared)
    return forward.compare_views(states, others, rollouts, needs)[f"logprobs@{name}"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("z", [0.0, 1.0, 2.0])
def test_log_probs_and_gradients_are_those_of_plain_rows(family, route, z, monkeypatch):
    monkeypatch.setattr(counterfactual, "CELLS_AT_ONCE", 600)  # several pieces per document
    forward, rollouts = make_forward(family, **ROUTES[route]), rollouts_of(family)
    logp, gradients = expected(family, z)
    found = compute(forward, rollouts, z, live=True)
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
    whole = compute(forward, rollouts, 1.0)
    for rows in ([0], [1, 4], [2, 3, 5, 6]):
        part = rollouts.rows(torch.tensor(rows))
        close(compute(forward, part, 1.0), whole[rows][:, : part.mask.shape[1]], atol=1e-5)


def test_it_is_another_view_only_where_there_is_an_image(family):
    forward, rollouts = make_forward(family), rollouts_of(family)
    other, clean = compute(forward, rollouts, 1.0), forward.signals(rollouts).old_logprobs
    text = ~rollouts.visual
    same(other[text], clean[text])
    assert (other - clean)[~text].abs().max() > 1e-3, "the view changes something"
    close(compute(forward, rollouts, 99.0), clean, atol=1e-5)


def test_the_images_are_encoded_once(family, monkeypatch):
    forward, rollouts, asked = make_forward(family), rollouts_of(family), []
    encode = forward.backbone.encode_images
    monkeypatch.setattr(forward.backbone, "encode_images", lambda inputs: asked.append(len(inputs)) or encode(inputs))
    compute(forward, rollouts, 1.0)
    assert asked == [len(rollouts.prompts)]


def test_other_attention_is_refused():
    backbone = fresh_backbone("qwen2_5_vl")
    backbone.language_model.config._attn_implementation = "eager"
    with pytest.raises(ValueError, match="reads or changes attention needs attn_implementation auto or sdpa"):
        compute(Forward(backbone, get_encoder("qwen2_5_vl")), rollouts_of("qwen2_5_vl"), 2.0)
