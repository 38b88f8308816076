"""Attention on text and image against the whole matrices of Hugging Face's eager attention, every family and route."""

import math
from functools import lru_cache

import numpy as np
import pytest
import torch
from test_forward import ROUTES
from tiny_models import (
    TINY_FAMILIES,
    VISION_FAMILIES,
    checkpoint,
    get_encoder,
    plain_inputs,
    prompts_for,
    random_rollouts,
    shared_backbone,
)

from mtrl.algorithms.signals import SHIFTS, pool_sizes, segment, sequence_mass, vgr
from mtrl.models import attention_maps
from mtrl.models.attention_shifts import fisher_rao
from mtrl.models.backbone import Backbone
from mtrl.models.forward import Forward
from mtrl.models.load_model import load_model
from mtrl.models.perturb import Perturbation
from mtrl.types import SEGMENTS, TEXT_POOL, VISION_POOL, Needs
from pretraining.tiny_checkpoints import make_tiny_checkpoint

pytestmark = pytest.mark.pairwise("family", "route")
GROUP, LENGTHS = [0, 0, 1, 3, 0, 2, 3], [6, 2, 4, 1, 0, 6, 5]


@pytest.fixture(params=TINY_FAMILIES)
def family(request):
    return request.param


@pytest.fixture(params=ROUTES)
def route(request):
    return ROUTES[request.param]


def rollouts_for(family):
    return random_rollouts(prompts_for(family), GROUP, LENGTHS)


@lru_cache
def eager_model(family):
    return load_model(checkpoint(family), attn_implementation="eager")


@lru_cache
def eager_shares(family, row, last_k=None):
    """{segment: [L + length, 2]}: the spec's order of operations, in float64, from the matrices of a single row."""
    pool = rollouts_for(family).prompts[GROUP[row]].token_pool
    maps = eager_maps(family, row, last_k)
    return {
        name: torch.stack([each[:, pool == kind].sum(1) for kind in (TEXT_POOL, VISION_POOL)], -1)
        for name, each in maps.items()
    }


@lru_cache
def eager_maps(family, row, last_k=None):
    """{segment: [L + length, L]}: the same for each token of the prompt."""
    rollouts = rollouts_for(family)
    prompt, length = rollouts.prompts[GROUP[row]], LENGTHS[row]
    inputs = plain_inputs(get_encoder(family), prompt, rollouts.tokens[row, :length])
    with torch.no_grad():
        matrices = eager_model(family)(**inputs, output_attentions=True, use_cache=False).attentions
    shares = []
    for layer in matrices:
        rows = layer[0].double().mean(0)[:, : len(prompt.ids)]  # mean of heads, prompt keys
        rows[:, 0] = 0  # the sink
        shares.append(rows / rows.sum(1, keepdim=True))
    layers = np.arange(len(shares))
    thirds = dict(zip(SEGMENTS, np.array_split(layers, 3), strict=False))
    last = layers if last_k is None else layers[-last_k:]
    chosen = thirds | {"all": last, "weight": last}
    nothing = torch.zeros_like(shares[0])
    return {
        name: torch.stack([shares[i] for i in which]).mean(0) if len(which) else nothing
        for name, which in chosen.items()
    }


def close(actual, expected, atol=1e-5):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=atol)


@pytest.mark.parametrize("last_k", [None, 1])
def test_masses_equal_those_of_eager_matrices(family, route, last_k):
    rollouts = rollouts_for(family)
    forward = Forward(shared_backbone(family), get_encoder(family), attention_last_k_layers=last_k, **route)
    signals = forward.signals(rollouts, Needs("old_logprobs", "attention_mass"))
    assert signals.attention_mass.shape == (len(GROUP), max(LENGTHS), len(SEGMENTS), 2)
    for row, length in enumerate(LENGTHS):
        size = len(rollouts.prompts[GROUP[row]].ids)
        for name, expected in eager_shares(family, row, last_k).items():
            close(segment(signals.attention_mass[row, :length], name), expected[size - 1 : size - 1 + length])
        assert (signals.attention_mass[row, length:] == 0).all()


def test_prompt_masses_equal_those_of_eager_matrices(family, route):
    """The mean over the prompt's positions after its last image."""
    rollouts = rollouts_for(family)
    signals = Forward(shared_backbone(family), get_encoder(family), **route).signals(
        rollouts, Needs("old_logprobs", "attention_mass")
    )
    for row in range(len(GROUP)):
        pool = rollouts.prompts[GROUP[row]].token_pool
        seen = (pool == VISION_POOL).nonzero()
        begin = max(int(seen[-1]) + 1 if len(seen) else 0, 1)  # the sink itself attends to nothing that counts
        for name, shares in eager_shares(family, row).items() if len(seen) else ():
            close(segment(signals.prompt_attention_mass[row], name), shares[begin : len(pool)].mean(0))


def test_two_layers_have_no_third_third(tmp_path):
    path = make_tiny_checkpoint(tmp_path, "qwen2", layers=2)
    forward = Forward(Backbone(load_model(path)), get_encoder("qwen2"))
    mass = forward.signals(rollouts_for("qwen2"), Needs("attention_mass")).attention_mass[0, : LENGTHS[0]]
    assert segment(mass, "late").isnan().all() and segment(mass, "all").isfinite().all()


@pytest.mark.parametrize("family", VISION_FAMILIES, indirect=True)
def test_masses_differ_enough_to_test(family):
    rollouts = rollouts_for(family)
    signals = Forward(shared_backbone(family), get_encoder(family)).signals(
        rollouts, Needs("old_logprobs", "attention_mass")
    )
    ratio = vgr(
        segment(sequence_mass(signals.attention_mass, rollouts.mask), "all"),
        pool_sizes(rollouts.prompts)[rollouts.group],
    )
    applies = rollouts.visual & rollouts.mask.any(1)
    assert ratio[applies].std() > 0.05
    by_group = [ratio[applies & (rollouts.group == g)] for g in (0, 3)]
    assert min(each.std() for each in by_group) > 1e-4, "the pools are the prompt's; the masses are not"
    assert ratio[~rollouts.visual].isnan().all(), "no image: not applicable"


@pytest.mark.parametrize("family", VISION_FAMILIES, indirect=True)
def test_the_perturbed_view_leaves_the_clean_masses_alone(family, route):
    rollouts = rollouts_for(family)
    views = [Perturbation(seed=7).view(prompt, 0) for prompt in rollouts.prompts]
    forward = Forward(shared_backbone(family), get_encoder(family), **route)
    alone = forward.signals(rollouts, Needs("old_logprobs", "attention_mass"))
    both = forward.signals(rollouts, Needs("dependency", "attention_mass", "entropy"), {"perturbed": views})
    torch.testing.assert_close(both.attention_mass, alone.attention_mass, rtol=0, atol=1e-5, equal_nan=True)
    close(both.old_logprobs, alone.old_logprobs)


@pytest.mark.parametrize("family", VISION_FAMILIES, indirect=True)
def test_maps_equal_those_of_eager_matrices(family, route):
    """Token by token, and their sums over the pools are the masses."""
    rollouts = rollouts_for(family)
    forward = Forward(shared_backbone(family), get_encoder(family), **route)
    for row, tokens in {0: [5, 0, 2], 3: [0], 5: [3]}.items():
        one = rollouts.rows(torch.tensor([row]))
        prompt = one.prompts[0]
        size = len(prompt.ids)
        maps = forward.maps(one, tokens)
        assert maps.shape == (len(tokens), len(SEGMENTS), size)
        for number, name in enumerate(SEGMENTS):
            close(maps[:, number], eager_maps(family, row)[name][[size - 1 + token for token in tokens]])
        mass = forward.signals(one, Needs("attention_mass")).attention_mass[0, tokens]
        sums = torch.stack([maps[..., prompt.token_pool == pool].sum(-1) for pool in (TEXT_POOL, VISION_POOL)], -1)
        close(sums, mass.nan_to_num())
        assert maps[:, SEGMENTS.index("all"), prompt.token_pool == VISION_POOL].std() > 1e-3, "worth drawing"


@pytest.mark.parametrize("family", VISION_FAMILIES[:1], indirect=True)
def test_other_attention_is_an_error_that_names_it(family):
    forward = Forward(Backbone(eager_model(family)), get_encoder(family))
    with pytest.raises(ValueError, match="attn_implementation"):
        forward.signals(rollouts_for(family), Needs("attention_mass"))


# ----------------------------------------------------------------------------------------------- maps for the record
@pytest.mark.parametrize("family", VISION_FAMILIES, indirect=True)
@pytest.mark.parametrize("last_k", [None, 1])
def test_maps_of_whole_responses_equal_those_of_eager_matrices(family, route, last_k):
    """Every token's attention on every image token, of several images too; a token's sum is its vision mass."""
    rollouts = rollouts_for(family)
    forward = Forward(shared_backbone(family), get_encoder(family), attention_last_k_layers=last_k, **route)
    signals = forward.signals(rollouts, Needs("attention_maps", "attention_mass"))
    assert signals.old_logprobs is None, "the vocabulary is left alone"
    for row, length in enumerate(LENGTHS):
        pool = rollouts.prompts[GROUP[row]].token_pool
        if not length or not (pool == VISION_POOL).any():
            assert signals.attention_maps[row] is None
            continue
        found = signals.attention_maps[row]
        expected = eager_maps(family, row, last_k)["all"][len(pool) - 1 : len(pool) - 1 + length, pool == VISION_POOL]
        assert found.levels.shape == expected.shape and found.levels.dtype == torch.uint8
        close(found.shares.sum(1), expected.sum(1))
        close(found.shares.sum(1), segment(signals.attention_mass[row, :length], "all")[:, 1])
        most = expected.amax(1, keepdim=True)
        error = (found.shares - expected).abs() / (expected * most).sqrt().clamp(min=most / 255)
        assert error.max() < 2 / 255, "half a level of a root, and what the scale moves"
        assert found.shares.std(1).min() > 1e-4, "worth drawing"


# ---------------------------------------------------------------------------------------------------------- its moves
def moves_by_definition(family, row):
    """[length, 4] shares and shifts of the last layer, in float64, token by token from its eager matrix."""
    rollouts = rollouts_for(family)
    prompt, length = rollouts.prompts[GROUP[row]], LENGTHS[row]
    inputs = plain_inputs(get_encoder(family), prompt, rollouts.tokens[row, :length])
    with torch.no_grad():
        matrix = eager_model(family)(**inputs, output_attentions=True, use_cache=False).attentions[-1][0]
    vision = (prompt.token_pool == VISION_POOL).nonzero().flatten().tolist()
    first, last, before, found = vision[0], vision[-1], None, []
    for token in range(length):
        place = len(prompt.ids) - 1 + token
        seen = matrix[:, place].double().mean(0)[: place + 1].numpy()
        parts = seen[first:last], seen[last:]
        shifts = [0.0, 0.0]
        if before is not None:
            for number, (old, new) in enumerate(zip(before, parts, strict=True)):
                p, q = (each[: len(old)] / each[: len(old)].sum() for each in (old, new))
                shifts[number] = 2 * np.arccos(min(1.0, np.sqrt(p * q).sum()))
        found.append([*(each.sum() for each in parts), *shifts])
        before = parts
    return torch.tensor(np.array(found))


@pytest.mark.parametrize("family", VISION_FAMILIES, indirect=True)
def test_moves_of_attention_equal_those_of_the_last_eager_matrix(family, route, monkeypatch):
    rollouts = rollouts_for(family)
    forward = Forward(shared_backbone(family), get_encoder(family), **route)
    signals = forward.signals(rollouts, Needs(*SHIFTS))
    assert signals.old_logprobs is None, "the vocabulary is left alone"
    heads = shared_backbone(family).language_model.config.num_attention_heads
    for scores in (None, 1, 3 * heads * 40):  # whole responses, a token at a time, and a few
        if scores is not None:
            monkeypatch.setattr(attention_maps, "SCORES_AT_ONCE", scores)
            signals = forward.signals(rollouts, Needs("image_shift"))
        found = torch.stack([signals.by_name(name) for name in SHIFTS], -1)
        for row, length in enumerate(LENGTHS):
            assert not found[row, length:].any()
            if not rollouts.prompts[GROUP[row]].task.visual:
                assert not found[row].any(), "no image to move in"
            elif length:
                expected = moves_by_definition(family, row)
                close(found[row, :length, :2], expected[:, :2])
                # arccos turns the rounding of a sum near 1 into its root
                close(found[row, :length, 2:], expected[:, 2:], atol=2e-3)
    assert found[0, 1:, 2:].min() > 0.01, "they move"


def test_moves_by_hand():
    rows = torch.tensor([[[0.1, 0.1, 0.0], [0.3, 0.0, 0.3], [0.3, 0.0, 0.3]]])
    everything = 2 * math.acos(0.5)  # p = .5 .5 0, q = .5 0 .5
    half = 2 * math.acos(math.sqrt(0.5))  # over the first two keys q = 1 0
    close(fisher_rao(rows), torch.tensor([[everything, 0.0]]), atol=1e-3)
    close(fisher_rao(rows, torch.tensor([[1, 1, 0], [1, 1, 1]])), torch.tensor([[half, 0.0]]), atol=1e-3)
    close(fisher_rao(rows[..., :0]), torch.zeros(1, 2))


@pytest.mark.parametrize("family", VISION_FAMILIES[:1], indirect=True)
def test_pieces_make_the_same_maps(family, route, monkeypatch):
    rollouts = rollouts_for(family)
    forward = Forward(shared_backbone(family), get_encoder(family), **route)
    whole = forward.signals(rollouts, Needs("attention_maps")).attention_maps
    heads = shared_backbone(family).language_model.config.num_attention_heads
    for scores in (1, 3 * heads * 40):  # a token at a time, and a few
        monkeypatch.setattr(attention_maps, "SCORES_AT_ONCE", scores)
        for one, other in zip(whole, forward.signals(rollouts, Needs("attention_maps")).attention_maps, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(other.shares, one.shares, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", VISION_FAMILIES[:1], indirect=True)
def test_maps_that_are_too_large_are_left_out(family, monkeypatch):
    rollouts = rollouts_for(family)
    forward = Forward(shared_backbone(family), get_encoder(family))
    image_tokens = int((rollouts.prompts[0].token_pool == VISION_POOL).sum())
    monkeypatch.setattr(attention_maps, "CELLS_PER_RESPONSE", 5 * image_tokens)
    maps = forward.signals(rollouts, Needs("attention_maps")).attention_maps
    assert maps[0] is None and maps[1] is not None, "six tokens are one too many"
    monkeypatch.setattr(attention_maps, "CELLS_PER_PASS", 0)
    assert forward.signals(rollouts, Needs("attention_maps")).attention_maps == (None,) * len(rollouts)
