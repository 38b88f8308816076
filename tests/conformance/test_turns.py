"""Responses of several turns: every own token is scored as by a plain forward over the conversation before it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import (
    CHECKED_FAMILIES,
    TEXT_FAMILIES,
    TINY_FAMILIES,
    fresh_backbone,
    get_encoder,
    plain_log_probs,
    plain_model,
    random_rollouts,
    shared_backbone,
)

from mtrl.models.forward import Forward
from mtrl.models.perturb import Perturbation
from mtrl.models.turns import conversation, encoded_prompts
from mtrl.types import EnvironmentTurn, Medium, Needs, Observations, Task

pytestmark = pytest.mark.pairwise("family", "route")
GROUP, LENGTHS = [0, 0, 1, 1, 2], [6, 2, 7, 4, 5]
AFTER = [(2, 5), (), (3,), (4,), (1, 2, 4)]  # own tokens before each message; the fourth ends with one
IMAGES = {(0, 0): [(3, 4)], (2, 0): [(2, 5)], (4, 0): [], (4, 1): [(1, 2), (4, 3)]}  # sides of those in a message
ROUTES = {
    "shared prefix": {"share_prefix": True},
    "a row each": {"share_prefix": False},
    "shared and packed": {"share_prefix": True, "packed": True},
}
FAMILIES = [*TINY_FAMILIES, *(each for each in CHECKED_FAMILIES if each not in TINY_FAMILIES)]


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(params=[each for each in FAMILIES if each not in TEXT_FAMILIES])
def seeing(request):
    """A family that takes images."""
    return request.param


@pytest.fixture(params=ROUTES)
def route(request):
    return ROUTES[request.param]


def conversations(family, seed=0):
    """Random responses, with messages of which some have images."""
    words = ["which colour is it", "how many", "what is left of the red circle and why"]
    prompts = [say(family, f"t:{i}", words[i], sides) for i, sides in enumerate([[(5, 9)], [], [(2, 3), (6, 4)]])]
    rollouts = random_rollouts(prompts, GROUP, LENGTHS, seed)
    return replace(rollouts, observations=tuple(observe(family, row, places) for row, places in enumerate(AFTER)))


def say(family, name, words, sides):
    """A prompt whose images have about so many tokens in height and width."""
    encoder, random = get_encoder(family), np.random.default_rng(len(words))
    sides = [] if family in TEXT_FAMILIES else sides
    targets = [encoder.target_size(*(28 * side for side in each)) for each in sides]
    media = [random.integers(0, 256, (*target, 3), dtype=np.uint8) for target in targets]
    content = [*({"type": "image"} for _ in media), {"type": "text", "text": words}]
    task = Task(name, name, ({"role": "user", "content": content},), media=len(media) * (Medium("image", None),))
    return encoder.encode(task, media)


def observe(family, row, places):
    turns = []
    for turn, after in enumerate(places):
        message = say(family, f"m:{row}.{turn}", f"here it is {'again ' * row}", IMAGES.get((row, turn), []))
        turns.append(EnvironmentTurn(after, message, ("zoom",)))
    return Observations(f"t:{row}#0", tuple(turns)) if turns else None


def plain_turns(family, rollouts, row, model=None):
    """[own tokens]: turn by turn, each given the whole conversation before it, by transformers alone."""
    before, own = rollouts.prompts[GROUP[row]], rollouts.tokens[row, : LENGTHS[row]]
    ends, observed, found = [*AFTER[row], len(own)], rollouts.observed[row], []
    for turn, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if turn:
            before = conversation(Observations("", observed.turns[:turn]), rollouts.prompts[GROUP[row]], own[:begin])
        if begin < end:
            log_probs = plain_log_probs(family, before, own[begin:end], model=model)
            found.append(log_probs.gather(-1, own[begin:end, None])[:, 0])
    return torch.cat(found)


def test_log_probs_equal_those_of_each_turn_by_itself(family, route):
    rollouts, forward = conversations(family), Forward(shared_backbone(family), get_encoder(family), **route)
    old = forward.signals(rollouts).old_logprobs
    for row, length in enumerate(LENGTHS):
        with torch.no_grad():
            expected = plain_turns(family, rollouts, row)
        torch.testing.assert_close(old[row, :length], expected, rtol=0, atol=2e-5)
    without = forward.signals(replace(rollouts, observations=None)).old_logprobs
    changed = (old - without).abs() > 1e-3
    assert changed[0, 2:].any() and changed[4, 1:].any() and not changed[1].any(), "messages matter, to what follows"
    assert not changed[0, :2].any() and not changed[3].any()


def test_gradients_equal_those_of_each_turn_by_itself(family, route):
    rollouts, backbone = conversations(family), fresh_backbone(family)
    forward, weights = Forward(backbone, get_encoder(family), **route), torch.rand(rollouts.mask.shape)
    (forward.logp(rollouts) * weights).sum().backward()
    plain = plain_model(family)
    plain.zero_grad()
    total = sum((plain_turns(family, rollouts, row, plain) * weights[row, :n]).sum() for row, n in enumerate(LENGTHS))
    total.backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in backbone.model.named_parameters():
        if parameter.grad is not None and theirs[name].grad is not None:
            scale = theirs[name].grad.abs().max().clamp(min=1e-2)
            atol = 1e-3 if "linear_attn" in name else 2e-4  # decay rates sum up many numbers that cancel out
            torch.testing.assert_close(parameter.grad / scale, theirs[name].grad / scale, rtol=0, atol=atol, msg=name)
    assert any(parameter.grad is not None for parameter in backbone.model.parameters())


def test_other_views_change_the_images_of_messages_too(seeing):
    """A row whose prompt has no image depends on the one that it was shown, from there on."""
    rollouts, forward = conversations(seeing), Forward(shared_backbone(seeing), get_encoder(seeing))
    views = {"perturbed": [Perturbation(seed=7).view(each, 0) for each in encoded_prompts(rollouts)]}
    signals = forward.signals(rollouts, Needs("old_logprobs", "perturbed_logprobs"), views)
    assert rollouts.visual.tolist() == [True, True, True, False, True]
    moved = (signals.perturbed_logprobs - signals.old_logprobs).abs()
    assert (moved[2, :3] < 1e-5).all() and (moved[2, 3:7] > 1e-4).any()
    assert (moved[3] < 1e-5).all(), "its messages are text"


def test_a_view_without_images_keeps_positions(seeing):
    """As if no token could attend to the tokens of any image."""
    rollouts, forward = conversations(seeing), Forward(shared_backbone(seeing), get_encoder(seeing))
    blind = {"none": [None if each.media else () for each in encoded_prompts(rollouts)]}
    found = forward.signals(rollouts, Needs("logprobs@none"), blind).extra["logprobs@none"]
    grey = replace(rollouts, prompts=tuple(repaint(each) for each in rollouts.prompts), observations=tuple(
        each and replace(each, turns=tuple(replace(turn, message=repaint(turn.message)) for turn in each.turns))
        for each in rollouts.observed))  # fmt: skip
    again = forward.signals(grey, Needs("logprobs@none"), blind).extra["logprobs@none"]
    torch.testing.assert_close(found, again, rtol=0, atol=1e-6, msg="pixels do not matter")
    assert (found - forward.signals(rollouts).old_logprobs).abs().max() > 1e-3


def repaint(encoded):
    return replace(encoded, media=tuple(255 - medium for medium in encoded.media))


def test_tokens_of_messages_count_for_passes_alone():
    rollouts = conversations("qwen2_5_vl")
    content = [sum(len(turn.message.ids) for turn in each.turns) if each else 0 for each in rollouts.observed]
    assert rollouts.read_tokens.tolist() == [n + more for n, more in zip(LENGTHS, content, strict=True)]
    assert rollouts.mask.sum(1).tolist() == LENGTHS
    part = rollouts.rows(torch.tensor([4, 0]))
    assert part.observations == (rollouts.observations[4], rollouts.observations[0])
