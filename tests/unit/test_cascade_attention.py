"""Attention in two parts, own tokens and the shared prompt, equals attention with the mask as a matrix.

The flash kernels run on CUDA alone (tests/gpu/test_attention_cuda.py). Here plain ones with the same contract stand in:
backward recomputes probabilities from the output and lse that it is given.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import checkpoint

from mtrl.compose.family_checks import make_check_rollouts
from mtrl.models import cascade_attention as cascade
from mtrl.models.backbone import Backbone
from mtrl.models.cascade_attention import CascadeMask
from mtrl.models.document_mask import DocumentMask
from mtrl.models.families import load_encoder
from mtrl.models.forward import Forward
from mtrl.models.load_model import load_model
from mtrl.types import Needs

CPU = torch.device("cpu")
HEADS, SHARED_BY, WIDTH = 4, 2, 8  # query heads, those that share a key head, width of a head
calls = []


def scores_of(query, key, spans, scale):
    """For each span its queries, its keys, and their scores [heads, queries, keys]."""
    bounds = zip(spans.query.tolist(), spans.key.tolist(), strict=True)
    for (q0, k0), (q1, k1) in pairwise(bounds):
        q, k = query[q0:q1], key[k0:k1].repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        if spans.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
        yield slice(q0, q1), slice(k0, k1), scores


def plain_forward(query, key, value, spans, scale):
    calls.append(spans)
    sharing = query.shape[1] // key.shape[1]
    output, lse = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
    for queries, keys, scores in scores_of(query, key, spans, scale):
        lse[:, queries] = scores.logsumexp(-1) if scores.shape[2] else torch.inf
        values = value[keys].repeat_interleave(sharing, 1)
        output[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return output, lse


def plain_backward(grad, query, key, value, output, lse, spans, scale):
    sharing = query.shape[1] // key.shape[1]
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for queries, keys, scores in scores_of(query, key, spans, scale):
        probs, g = (scores - lse[:, queries, None]).exp(), grad[queries]
        wide_key, wide_value = (each[keys].repeat_interleave(sharing, 1) for each in (key, value))
        mean = (g * output[queries]).sum(-1).T[..., None]
        d_scores = probs * (torch.einsum("qhd,khd->hqk", g, wide_value) - mean) * scale
        grads[0][queries] += torch.einsum("hqk,khd->qhd", d_scores, wide_key)
        d_key, d_value = (torch.einsum("hqk,qhd->khd", *pair) for pair in ((d_scores, query[queries]), (probs, g)))
        grads[1][keys] += d_key.unflatten(1, (-1, sharing)).sum(2)
        grads[2][keys] += d_value.unflatten(1, (-1, sharing)).sum(2)
    return grads


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch):
    monkeypatch.setattr(cascade, "flash_forward", plain_forward)
    monkeypatch.setattr(cascade, "flash_backward", plain_backward)
    calls.clear()


def make_documents(groups, padding):
    """`groups` are the sizes of a prompt and of its responses."""
    segment, prompt, number = [], [], 0
    for size, *responses in groups:
        segment += size * [number] + [number + 1 + i for i, length in enumerate(responses) for _ in range(length)]
        prompt += (size + sum(responses)) * [number]
        number += 1 + len(responses)
    rows = torch.tensor([segment + padding * [-1]]), torch.tensor([prompt + padding * [-1]])
    return DocumentMask(*rows)


groups = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(0, 7), max_size=4)).map(lambda g: (g[0], *g[1])),
    min_size=1, max_size=4,
)  # fmt: skip


@given(groups, st.integers(0, 5), st.integers(0, 2**31))
def test_outputs_and_gradients_equal_those_of_the_matrix(groups, padding, seed):
    documents, draw = make_documents(groups, padding), torch.Generator().manual_seed(seed)
    size = documents.segment.shape[1]
    inputs = [
        torch.randn(size, heads, WIDTH, generator=draw, dtype=torch.float64, requires_grad=True)
        for heads in (HEADS, HEADS // SHARED_BY, HEADS // SHARED_BY)
    ]
    query, key, value = (each.transpose(0, 1)[None] for each in inputs)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, documents.dense(), scale=0.5, enable_gqa=True
    )[0].transpose(0, 1)
    found, _ = cascade.cascade_attention(*inputs, CascadeMask.from_documents(documents, CPU), 0.5)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    weights = torch.randn(expected.shape, generator=draw, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((each * weights).sum(), inputs) for each in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_prompts_with_one_response_take_one_call():
    documents = make_documents([(5, 3), (4,), (2, 0), (6, 7)], 2)
    mask = CascadeMask.from_documents(documents, CPU)
    assert mask.to_prompts is None
    assert mask.own.query.tolist() == [0, 8, 12, 14, 27, 29]


def test_a_prompt_is_read_once_for_its_group():
    mask = CascadeMask.from_documents(make_documents([(5, 3, 2), (4,), (6, 7, 1, 2)], 1), CPU)
    spans = mask.to_prompts
    assert spans.query.tolist() == [0, 5, 10, 14, 14, 20, 30, 31, 31], "prompts and their responses in turn"
    assert spans.key.tolist() == [0, 0, 5, 5, 5, 5, 11, 11, 11], "prompts read nothing"
    assert mask.prompts.tolist() == [*range(5), *range(14, 20)]
    assert (spans.max_query, spans.max_key, spans.causal) == (10, 6, False)
    assert mask.own.max_key == 7 and mask.own.causal


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen2"])
def test_a_model_gives_the_same_numbers(family, monkeypatch):
    """Through the layers of transformers, which must hand the mask on; log-probs, masses and gradients."""
    path = checkpoint(family)
    encoder = load_encoder(path)
    rollouts = make_check_rollouts(encoder)
    needs = Needs("old_logprobs", "entropy") if family == "qwen2" else Needs("old_logprobs", "attention_mass")

    def run(packed):
        forward = Forward(Backbone(load_model(path)), encoder, packed=packed)
        signals = forward.signals(rollouts, needs)
        forward.logp(rollouts).sum().backward()
        gradients = {name: p.grad for name, p in forward.backbone.model.named_parameters() if p.grad is not None}
        return signals, gradients

    expected, expected_gradients = run(packed=False)
    assert not calls
    monkeypatch.setattr(
        Backbone, "make_mask", lambda backbone, documents, packed, rule: CascadeMask.from_documents(documents, CPU)
    )
    found, gradients = run(packed=True)
    assert any(not spans.causal for spans in calls)
    names = ["old_logprobs", *(["attention_mass"] if "attention_mass" in needs else [])]
    for name in names:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=1e-5)
    for name, gradient in expected_gradients.items():
        scale = max(gradient.abs().max(), 1e-4 * max(g.abs().max() for g in expected_gradients.values()))
        if "A_log" not in name and "dt_bias" not in name:  # they lose their digits in float32
            assert (gradients[name] - gradient).abs().max() <= 1e-4 * scale, name
