"""The engine of graphs on a GPU, against the plain one. Skipped without a GPU."""

import gc
import time
from dataclasses import replace

import pytest
import torch
from tiny_models import checkpoint, get_encoder, prompts_for

from benchmarks.random_model import random_backbone, random_prompts
from mtrl.embedded.embedded_rows import MODEL_DIRECTORY
from mtrl.embedded.task import make_question
from mtrl.models.backbone import Backbone
from mtrl.models.families import load_encoder
from mtrl.models.forward import Forward
from mtrl.models.load_model import load_model
from mtrl.rollout.decode.engine import GraphGenerator, make_fastest_generator
from mtrl.rollout.decode.step import triton_ops
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Sampling
from pretraining.evaluation import make_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("exact_products"),
]

SAMPLED = Sampling(n=4, max_new_tokens=24)
GREEDY = replace(SAMPLED, n=1, temperature=0)
# Families with kinds of layers that the embedded model lacks.
KINDS = ["gemma3", "gemma3_text", "qwen3_5", "qwen3_5_moe", "qwen3_vl_moe", "glm4v", "glm4v_moe"]


@pytest.fixture(scope="module")
def encoder():
    return load_encoder(MODEL_DIRECTORY)


@pytest.fixture(scope="module")
def prompts(encoder):
    return make_prompts([make_question("test", index) for index in range(24)], encoder)


def make_backbone(compute=torch.float32):
    return Backbone(load_model(MODEL_DIRECTORY, device="cuda"), compute)


def engine(backbone, encoder, **more):
    return GraphGenerator(backbone, encoder, ops=triton_ops(), **more)


@pytest.mark.parametrize("family", ["zoo", *KINDS])
def test_the_engine_is_chosen_where_it_knows_the_layers(encoder, family):
    backbone = make_backbone() if family == "zoo" else make_tiny(family)
    assert type(make_fastest_generator(backbone, encoder)) is GraphGenerator


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_greedy_tokens_equal_the_plain_engine(encoder, prompts, device):
    expected = LocalGenerator(Backbone(load_model(MODEL_DIRECTORY, device=device)), encoder).generate(prompts, GREEDY)
    found = engine(make_backbone(), encoder).generate(prompts, GREEDY)
    assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.mask, expected.mask)
    torch.testing.assert_close(found.rollout_logprobs, expected.rollout_logprobs, rtol=0, atol=1e-3)


def test_responses_cut_by_their_length_equal_the_plain_engines(encoder, prompts):
    """In the first batch, in which graphs are captured, and in the next one."""
    backbone, short = make_backbone(), replace(GREEDY, max_new_tokens=3)
    expected, decode = LocalGenerator(backbone, encoder).generate(prompts, short), engine(backbone, encoder)
    for _ in range(2):
        found = decode.generate(prompts, short)
        assert torch.equal(found.tokens, expected.tokens) and set(found.finish_reason) == {"length"}
        torch.testing.assert_close(found.rollout_logprobs, expected.rollout_logprobs, rtol=0, atol=1e-3)


def make_tiny(family, compute=torch.float32):
    return Backbone(load_model(checkpoint(family), device="cuda"), compute)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_other_kinds_of_layers_give_the_tokens_of_the_plain_engine(family, sampling):
    """Prompts and responses beyond a window of 10 tokens; responses in slots that others have left."""
    backbone, encoder, prompts = make_tiny(family), get_encoder(family), 6 * prompts_for(family)
    expected = LocalGenerator(backbone, encoder).generate(prompts, sampling)
    for rows in (512, 20):
        found = engine(backbone, encoder, rows_at_once=rows).generate(prompts, sampling)
        assert sum(a == b for a, b in zip(found.text, expected.text, strict=True)) >= 0.97 * len(found)
        first = found.rollout_logprobs[:, 0] - expected.rollout_logprobs[:, 0]
        assert first.abs().max() < 1e-3


@pytest.mark.parametrize("family", KINDS)
def test_other_kinds_of_layers_in_bf16(family):
    backbone, encoder = make_tiny(family, torch.bfloat16), get_encoder(family)
    rollouts = engine(backbone, encoder).generate(prompts_for(family), SAMPLED)
    exact = Forward(make_tiny(family), encoder).signals(rollouts).old_logprobs
    narrow = Forward(backbone, encoder).signals(rollouts).old_logprobs
    noise = (narrow - exact)[rollouts.mask].abs().mean()
    assert (rollouts.rollout_logprobs - exact)[rollouts.mask].abs().mean() < 2 * noise + 1e-3


@pytest.mark.parametrize("family", KINDS)
def test_other_kinds_of_layers_follow_new_weights_and_sleep(family):
    backbone, encoder, prompts = make_tiny(family, torch.bfloat16), get_encoder(family), prompts_for(family)
    decode = engine(backbone, encoder)
    with decode.resident():
        decode.generate(prompts, SAMPLED)
    captures = decode.captures
    with torch.no_grad():
        for parameter in backbone.model.parameters():
            parameter.mul_(0.9)
    with decode.resident():
        found = decode.generate(prompts, SAMPLED)
    fresh = engine(backbone, encoder).generate(prompts, SAMPLED)
    assert torch.equal(found.tokens, fresh.tokens) and torch.equal(found.rollout_logprobs, fresh.rollout_logprobs)
    assert decode.captures == captures


CUTS = {"temperature": {"temperature": 0.8}, "top k": {"top_k": 20}, "top p": {"top_p": 0.8},
        "both": {"top_k": 50, "top_p": 0.9}}  # fmt: skip


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_sampled_tokens_equal_the_plain_engine(encoder, prompts, cut):
    """The same keys give the same uniforms; two rows differ only if a uniform falls between two tokens."""
    backbone, sampling = make_backbone(), replace(SAMPLED, **cut)
    expected = LocalGenerator(backbone, encoder).generate(prompts, sampling)
    found = engine(backbone, encoder).generate(prompts, sampling)
    assert sum(a == b for a, b in zip(found.text, expected.text, strict=True)) >= 0.97 * len(found)


def test_log_probs_are_the_trainers_within_bf16_noise(encoder, prompts):
    backbone = make_backbone(torch.bfloat16)  # float32 master weights
    rollouts = engine(backbone, encoder).generate(prompts, SAMPLED)
    exact = Forward(make_backbone(), encoder).signals(rollouts).old_logprobs
    narrow = Forward(backbone, encoder).signals(rollouts).old_logprobs
    noise = (narrow - exact)[rollouts.mask].abs().mean()
    assert (rollouts.rollout_logprobs - exact)[rollouts.mask].abs().mean() < 2 * noise + 1e-3


@pytest.mark.parametrize("rows", [16, 64])
def test_the_same_keys_give_the_same_tokens_whatever_the_batch(encoder, prompts, rows):
    backbone = make_backbone()
    whole = engine(backbone, encoder).generate(prompts, SAMPLED)
    parts = engine(backbone, encoder, rows_at_once=rows).generate(prompts, SAMPLED)
    assert whole.text == parts.text
    again = engine(backbone, encoder).generate(prompts, SAMPLED)
    assert torch.equal(whole.tokens, again.tokens) and torch.equal(whole.rollout_logprobs, again.rollout_logprobs)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
def test_new_weights_are_sampled_from(encoder, prompts, compute):
    """Shared weights (float32) and copied ones (bf16): in-place changes take effect without a new capture."""
    backbone = make_backbone(compute)
    decode = engine(backbone, encoder)
    decode.generate(prompts, GREEDY)
    captures = decode.captures
    with torch.no_grad():
        for parameter in backbone.model.parameters():
            parameter.mul_(0.9)
    found = decode.generate(prompts, GREEDY)
    fresh = engine(backbone, encoder).generate(prompts, GREEDY)
    assert torch.equal(found.tokens, fresh.tokens) and torch.equal(found.rollout_logprobs, fresh.rollout_logprobs)
    assert decode.captures == captures


@pytest.mark.parametrize("sleeps", [False, True])
def test_rounds_of_changing_sizes_hold_no_more_memory(encoder, prompts, sleeps):
    backbone = make_backbone(torch.bfloat16)
    decode, held, captures = engine(backbone, encoder), [], []
    for number in range(12):
        part = prompts[number % 5 : 12 + number % 7]
        sampling = replace(SAMPLED, n=2 + number % 3, step=number)
        if sleeps:
            with decode.resident():
                decode.generate(part, sampling)
        else:
            decode.generate(part, sampling)
        gc.collect()
        held.append(torch.cuda.memory_allocated())
        captures.append(decode.captures)
    assert held[-1] <= held[5] * 1.01, held
    assert sleeps or captures[-1] == captures[5], captures


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bf16", "fp32"])
def test_the_shape_of_3b_in_a_fraction_of_the_plain_engines_time(weights, capsys):
    """64 x 256 tokens, 576 image tokens and 66 others per prompt; random weights, nothing stops early. (The plain
    engine generates an eighth of them.)"""
    encoder, backbone = random_backbone("3b", "cuda", weights, "bf16", checkpointing=False)
    encoder.stop_ids = ()
    decode = engine(backbone, encoder)
    prompts, sampling = random_prompts(encoder, 8, [672], 66), Sampling(n=8, max_new_tokens=256)
    seconds = []
    for step in range(4):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        rollouts = decode.generate(prompts, replace(sampling, step=step))
        seconds.append(time.perf_counter() - begin)
    assert rollouts.mask.all() and rollouts.tokens.shape == (64, 256)
    with capsys.disabled():
        print(f"\n{weights} weights: 64 x 256 tokens in {sorted(seconds[1:])[1]:.2f} s, the first {seconds[0]:.2f} s")
    plain, few = LocalGenerator(backbone, encoder), replace(sampling, max_new_tokens=32)
    plain.generate(prompts, few)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    plain.generate(prompts, few)
    assert sorted(seconds[1:])[1] < 0.5 * 8 * (time.perf_counter() - begin)
