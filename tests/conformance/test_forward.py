"""Scores of sampled tokens against a plain Hugging Face forward of every row by itself."""

from dataclasses import replace

import pytest
import torch
from tiny_models import (
    TINY_FAMILIES,
    VISION_FAMILIES,
    get_encoder,
    plain_inputs,
    plain_log_probs,
    plain_logp,
    plain_model,
    prompts_for,
    random_rollouts,
    shared_backbone,
)
from transformers import AutoConfig, AutoModelForCausalLM

from mtrl.algorithms.signals import DEPENDENCY_LIMIT
from mtrl.models.backbone import Backbone
from mtrl.models.families.model_family import SHARED_PREFIX_TEXT_FAMILIES
from mtrl.models.forward import Forward
from mtrl.models.perturb import Perturbation
from mtrl.types import VISION_POOL, Needs

pytestmark = pytest.mark.pairwise("family", "route")
# Groups uneven and not in order; responses unequal, one empty, one prompt (the third) without any.
GROUP, LENGTHS = [0, 0, 1, 3, 0, 1, 3], [6, 2, 4, 1, 0, 6, 5]


@pytest.fixture(params=TINY_FAMILIES)
def family(request):
    return request.param


ROUTES = {
    "shared prefix": {"share_prefix": True},
    "a row each": {"share_prefix": False},
    "shared and packed": {"share_prefix": True, "packed": True},
    "packed": {"share_prefix": False, "packed": True},
}


@pytest.fixture(params=ROUTES)
def route(request):
    return ROUTES[request.param]


@pytest.fixture
def forward(family, route):
    backbone = shared_backbone(family)
    backbone.model.zero_grad()
    return Forward(backbone, get_encoder(family), **route)


def rollouts_for(family, seed=0):
    return random_rollouts(prompts_for(family), GROUP, LENGTHS, seed)


def make_views(rollouts, step=0):
    return [Perturbation(seed=7).view(prompt, step) for prompt in rollouts.prompts]


def close(actual, expected, atol=1e-5):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


# ---------------------------------------------------------------------------------------------------------- log-probs
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_a_plain_forward(family, forward, temperature):
    rollouts = rollouts_for(family)
    forward = replace(forward, temperature=temperature)
    with torch.no_grad():
        expected = plain_logp(family, rollouts, temperature=temperature)
    old = forward.signals(rollouts).old_logprobs
    close(old, expected)
    close(forward.logp(rollouts).detach(), expected)
    assert expected[rollouts.mask].std() > 0.5, "the rows differ enough to test"
    assert (old[~rollouts.mask] == 0).all() and (old[4] == 0).all()


def test_chunks_change_nothing(family, forward):
    rollouts = rollouts_for(family)
    small = replace(forward, chunk=5)
    close(small.signals(rollouts).old_logprobs, forward.signals(rollouts).old_logprobs, atol=1e-6)


def test_entropy_equals_a_plain_forward(family, forward):
    rollouts = rollouts_for(family)
    entropy = forward.signals(rollouts, Needs("entropy")).entropy
    for row in range(len(rollouts)):
        length = LENGTHS[row]
        with torch.no_grad():
            found = plain_log_probs(family, rollouts.prompts[GROUP[row]], rollouts.tokens[row, :length])
        expected = torch.special.entr(found.exp()).sum(-1)
        close(entropy[row, :length], expected)
        assert (entropy[row, length:] == 0).all()


def test_similarity_to_the_image_equals_a_plain_forward(family, forward):
    """Also with a second view, whose states it must ignore; rows without an image have none."""
    rollouts = rollouts_for(family)
    needs = Needs("similarity", "token_similarity", "perturbed_logprobs")
    signals = forward.signals(rollouts, needs, {"perturbed": make_views(rollouts)})
    for row, length in enumerate(LENGTHS):
        prompt = rollouts.prompts[GROUP[row]]
        inputs = plain_inputs(get_encoder(family), prompt, rollouts.tokens[row, :length])
        with torch.no_grad():
            states = plain_model(family)(**inputs, output_hidden_states=True).hidden_states[-1][0]
        seen = states[: len(prompt.ids)][prompt.token_pool == VISION_POOL]
        image = (seen / seen.norm(dim=-1, keepdim=True)).mean(0) if len(seen) else torch.zeros_like(states[0])
        predicting = states[len(prompt.ids) - 1 : len(prompt.ids) - 1 + length]
        close(signals.similarity[row, :length], torch.cosine_similarity(predicting, image, dim=-1))
        plain_mean, own = seen.mean(0) if len(seen) else image, states[len(prompt.ids) :]
        close(signals.token_similarity[row, :length], torch.cosine_similarity(own, plain_mean, dim=-1))
        assert (signals.similarity[row, length:] == 0).all() and (signals.token_similarity[row, length:] == 0).all()
        assert prompt.task.visual == bool(length and signals.similarity[row, 0] != 0) or not length
    old = forward.signals(rollouts).old_logprobs
    assert torch.equal(forward.signals(rollouts, Needs("old_logprobs", "similarity")).old_logprobs, old), (
        "it changes nothing else"
    )


def test_similarity_in_all_layers_equals_a_plain_forward(family, forward):
    """The mean over the embeddings and all layers of the mean cosine to each image token; 0 without an image."""
    rollouts = rollouts_for(family)
    needs = Needs("layer_similarity", "perturbed_logprobs")
    found = forward.signals(rollouts, needs, {"perturbed": make_views(rollouts)}).layer_similarity
    for row, length in enumerate(LENGTHS):
        prompt = rollouts.prompts[GROUP[row]]
        inputs = plain_inputs(get_encoder(family), prompt, rollouts.tokens[row, :length])
        with torch.no_grad():
            layers = plain_model(family)(**inputs, output_hidden_states=True).hidden_states
        assert len(layers) == 1 + len(forward.backbone.language_model.layers)
        expected = torch.zeros(length)
        if prompt.task.visual:
            image, own = prompt.token_pool == VISION_POOL, slice(len(prompt.ids), None)
            pairs = ((each[0, own, None], each[0, : len(prompt.ids)][image][None]) for each in layers)
            cosines = [torch.cosine_similarity(*pair, dim=-1) for pair in pairs]
            expected = torch.stack(cosines).mean((0, 2))
            assert not length or expected.abs().max() > 1e-3
        close(found[row, :length], expected)
        assert (found[row, length:] == 0).all()


def test_layers_are_compared_only_where_that_is_asked_for(family, forward):
    rollouts, layers = rollouts_for(family), forward.backbone.language_model.layers
    seen = []
    watch = layers[0].register_forward_hook(lambda layer, *_: seen.append(len(layer._forward_hooks)))
    needs = Needs("old_logprobs", "similarity", "token_similarity")
    plain, more = forward.signals(rollouts, needs), forward.signals(rollouts, needs | Needs("layer_similarity"))
    watch.remove()
    assert seen == [1, 2] and not layers[0]._forward_hooks and not layers[0]._forward_pre_hooks
    for name in needs.names:
        assert torch.equal(getattr(plain, name), getattr(more, name)), "it changes nothing else"
    small = replace(forward, chunk=5).signals(rollouts, Needs("layer_similarity"))
    close(small.layer_similarity, more.layer_similarity, atol=1e-6)


def test_unasked_fields_stay_empty(family, forward):
    signals = forward.signals(rollouts_for(family))
    assert signals.entropy is signals.dependency is signals.perturbed_logprobs is signals.similarity is None


def test_only_empty_responses(family, forward):
    """An empty batch is no error and gives no gradient."""
    rollouts = random_rollouts(prompts_for(family), [0, 1], [3, 3])
    rollouts.mask[:] = False
    signals = replace(forward, perception_estimator="full_kl").signals(
        rollouts, Needs("entropy", "dependency", "similarity", "layer_similarity"), {"perturbed": make_views(rollouts)}
    )
    assert all((x == 0).all() for x in (signals.old_logprobs, signals.entropy, signals.dependency))
    assert (signals.similarity == 0).all() and (signals.layer_similarity == 0).all()
    forward.logp(rollouts).sum().backward()
    assert all(p.grad is None or (p.grad == 0).all() for p in forward.backbone.model.parameters())


def test_forbidden_tokens_hold_no_probability(family, forward):
    """The probabilities of all other tokens add up to one: sum over every possible one-token response."""
    encoder = get_encoder(family)
    vocabulary = forward.backbone.output_matrix.shape[0]
    shortest = min(prompts_for(family), key=lambda prompt: len(prompt.ids))
    rollouts = random_rollouts([shortest], [0] * vocabulary, [1] * vocabulary)
    rollouts.tokens[:, 0] = torch.arange(vocabulary)
    each_reads_its_prompt = forward.packed and not forward.share_prefix  # all in one sequence, seen by a large matrix
    few = torch.arange(vocabulary).split(16 if each_reads_its_prompt else 256)
    probabilities = torch.cat([forward.signals(rollouts.rows(rows)).old_logprobs[:, 0] for rows in few]).double().exp()
    assert abs(float(probabilities.sum()) - 1) < 1e-5
    forbidden = torch.zeros(vocabulary, dtype=torch.bool)
    forbidden[list(encoder.forbidden_ids)] = True
    assert (probabilities[forbidden] == 0).all() and (probabilities[~forbidden] > 0).all()
    assert forbidden.any() == (family in VISION_FAMILIES)


@pytest.mark.parametrize("family", VISION_FAMILIES, indirect=True)
def test_forged_media_tokens_are_harmless(family, forward):
    """A response with image marks: -inf for the marks themselves, and a proper number for every other token."""
    encoder = get_encoder(family)
    rollouts = rollouts_for(family)
    clean = forward.signals(rollouts).old_logprobs
    for place, token in enumerate(encoder.forbidden_ids):
        rollouts.tokens[0, place] = token
        rollouts.tokens[5, place + 1] = token  # a text-only row
    signals = forward.signals(rollouts, Needs("dependency", "entropy"), {"perturbed": make_views(rollouts)})
    forged = torch.isin(rollouts.tokens, torch.tensor(encoder.forbidden_ids)) & rollouts.mask
    assert (signals.old_logprobs[forged] == -torch.inf).all()
    assert signals.old_logprobs[~forged].isfinite().all() and signals.entropy.isfinite().all()
    untouched = [1, 2, 3, 4, 6]
    close(signals.old_logprobs[untouched], clean[untouched], atol=1e-6)
    expected = torch.stack([plain_logp_of_forged(family, rollouts, row) for row in (0, 5)])
    close(signals.old_logprobs[[0, 5], 5], expected)


def plain_logp_of_forged(family, rollouts, row):
    """Log-prob of the last token of a forged row, with explicit embeddings and positions: upstream's own forward would
    look for the images of the marks."""
    encoder, model = get_encoder(family), plain_model(family)
    prompt, response = rollouts.prompts[GROUP[row]], rollouts.tokens[row]
    inputs = encoder.inputs(prompt)
    is_vision = torch.nn.functional.pad(prompt.token_pool == VISION_POOL, (0, len(response)))
    embeds = model.get_input_embeddings()(torch.cat([prompt.ids, response]))
    extra = {}
    with torch.no_grad():
        if "pixel_values" in inputs:
            images = {name: inputs[name] for name in ("pixel_values", "image_grid_thw") if name in inputs}
            seen = model.model.get_image_features(**images, return_dict=True)
            features = seen.pooler_output
            features = features if isinstance(features, torch.Tensor) else torch.cat(features)
            embeds = embeds.masked_scatter(is_vision[:, None], features)
            if getattr(seen, "deepstack_features", None):
                layers = [torch.cat(each) for each in seen.deepstack_features]
                extra = {"visual_pos_masks": is_vision[None], "deepstack_visual_embeds": layers}
        if "token_type_ids" in inputs:
            hidden = model.model(inputs_embeds=embeds[None], token_type_ids=is_vision[None].long())[0][0, -2]
        else:
            following = inputs["position_ids"].max() + 1 + torch.arange(len(response))
            positions = torch.cat([inputs["position_ids"], following.expand(3, -1)], 1)[:, None]
            hidden = model.model.language_model(inputs_embeds=embeds[None], position_ids=positions, **extra)[0][0, -2]
        logits = model.get_output_embeddings()(hidden)
    logits[list(encoder.forbidden_ids)] = -torch.inf
    return logits.log_softmax(-1)[response[-1]]


# ----------------------------------------------------------------------------------------------------------- gradients
def test_gradients_equal_a_plain_forward(family, forward):
    """Gradients of a weighted sum: equal weights would hide swapped tokens."""
    rollouts = rollouts_for(family)
    weights = torch.linspace(-1, 2, rollouts.mask.numel()).view(rollouts.mask.shape)
    (forward.logp(rollouts) * weights).sum().backward()
    plain = plain_model(family)
    (plain_logp(family, rollouts) * weights).sum().backward()
    theirs = {name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None}
    plain.zero_grad()
    ours = {name: p.grad for name, p in forward.backbone.model.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys() and any("vis" in name for name in ours) == (family in VISION_FAMILIES)
    for name, gradient in theirs.items():
        # The gradient of a decay is a sum that nearly vanishes: transformers' own is as far from float64.
        part = 1e-3 if name.endswith(("A_log", "dt_bias")) else 5e-5 if "linear_attn" in name else 2e-5
        # That of a bias of keys without rotary positions is 0 but for rounding: it moves all scores of a query alike.
        size = theirs[name.replace("k_proj.bias", "k_proj.weight") if "vision_tower" in name else name].abs().max()
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=part * float(size), msg=name)


# ---------------------------------------------------------------------------------------------------------- dependency
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_low_var_kl_equals_a_plain_computation(family, forward, temperature):
    rollouts = rollouts_for(family)
    views = make_views(rollouts)
    forward = replace(forward, temperature=temperature)
    signals = forward.signals(rollouts, Needs("dependency"), {"perturbed": views})
    with torch.no_grad():
        old = plain_logp(family, rollouts, temperature=temperature).double()
        other = plain_logp(family, rollouts, temperature=temperature, views=views).double()
    x = (other - old).clamp(-20, 20)
    expected = (x.exp() - x - 1).clamp(0, 10)
    close(signals.perturbed_logprobs, other.float())
    torch.testing.assert_close(signals.dependency.double(), expected, rtol=1e-4, atol=1e-5)
    seen = signals.dependency[rollouts.visual[:, None] & rollouts.mask]
    assert len(seen) == 0 or seen.max() > 0.01, "the views differ enough to test"
    assert (signals.dependency[~rollouts.mask] == 0).all()


def test_full_kl_equals_a_plain_computation(family, forward):
    rollouts = rollouts_for(family)
    views = make_views(rollouts)
    forward = replace(forward, perception_estimator="full_kl")
    dependency = forward.signals(rollouts, Needs("dependency"), {"perturbed": views}).dependency
    for row in range(len(rollouts)):
        prompt, length = rollouts.prompts[GROUP[row]], LENGTHS[row]
        response, view = rollouts.tokens[row, :length], views[GROUP[row]]
        with torch.no_grad():
            p = plain_log_probs(family, prompt, response).double()
            q = plain_log_probs(family, prompt, response, view=view).double()
        gap = (p - q).nan_to_num(0.0)
        expected = (p.exp() * gap).sum(-1).clamp(0, DEPENDENCY_LIMIT)
        close(dependency[row, :length].double(), expected)
        assert (dependency[row, length:] == 0).all()


@pytest.mark.parametrize("estimator", ["low_var_kl", "full_kl"])
def test_an_unchanged_view_has_no_dependency(family, forward, estimator):
    rollouts = rollouts_for(family)
    same = {"perturbed": [prompt.media for prompt in rollouts.prompts]}
    signals = replace(forward, perception_estimator=estimator).signals(rollouts, Needs("dependency"), same)
    close(signals.old_logprobs, signals.perturbed_logprobs)
    assert (signals.dependency < 1e-6).all()


@pytest.mark.parametrize("estimator", ["low_var_kl", "full_kl"])
def test_text_rows_depend_on_no_image(family, forward, estimator):
    """They run along in the batch; other rows' views leave them alone."""
    rollouts = rollouts_for(family)
    signals = replace(forward, perception_estimator=estimator).signals(
        rollouts, Needs("dependency"), {"perturbed": make_views(rollouts)}
    )
    assert (signals.dependency[~rollouts.visual] < 1e-9).all()


@pytest.mark.parametrize("family", VISION_FAMILIES, indirect=True)
def test_views_go_to_their_own_prompt(family, forward):
    """Another view of one prompt changes its rows alone."""
    rollouts = rollouts_for(family)
    views = [prompt.media for prompt in rollouts.prompts]
    views[3] = make_views(rollouts)[3]
    dependency = forward.signals(rollouts, Needs("dependency"), {"perturbed": views}).dependency
    theirs = rollouts.group == 3
    assert (dependency[theirs] > 1e-6).any() and (dependency[~theirs] < 1e-9).all()


def test_rows_do_not_depend_on_their_batch(family, forward):
    rollouts = rollouts_for(family)
    together = forward.signals(rollouts, Needs("entropy"))
    for row in (0, 2, 6):
        alone = forward.signals(rollouts.rows(torch.tensor([row])), Needs("entropy"))
        close(alone.old_logprobs[0], together.old_logprobs[row])
        close(alone.entropy[0], together.entropy[row])


# ---------------------------------------------------------------------------------------------------- other text models
TEXT_SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(set(SHARED_PREFIX_TEXT_FAMILIES) - set(TINY_FAMILIES)))
def test_every_family_that_may_share_its_prefix_is_exact(kind):
    torch.manual_seed(0)
    options = {"sliding_window": None} if kind == "mistral" else {}
    config = AutoConfig.for_model(kind, **TEXT_SIZES, **options)
    backbone = Backbone(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval())
    with torch.no_grad():
        for parameter in backbone.model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    assert backbone.can_share_prefix
    rollouts = rollouts_for("qwen2")
    forwards = [Forward(backbone, get_encoder("qwen2"), **route) for route in ROUTES.values()]
    plain = Forward(backbone, get_encoder("qwen2"), share_prefix=False).signals(rollouts).old_logprobs
    for forward in forwards:
        close(forward.signals(rollouts).old_logprobs, plain)
    assert plain[rollouts.mask].std() > 0.5


def test_an_unknown_family_reads_its_prompt_for_each_response():
    config = AutoConfig.for_model("stablelm", **TEXT_SIZES)
    assert not Backbone(AutoModelForCausalLM.from_config(config)).can_share_prefix
