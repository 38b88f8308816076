"""One suite for every rollout engine: the tokens and numbers are those of `model.generate` and a plain forward.

An engine enters the suite as a function in ENGINES that makes it from a family and an encoder.
"""

import copy
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch_ops as plain
from helpers import slow_but
from tiny_models import (
    TINY_FAMILIES,
    VISION_FAMILIES,
    checkpoint,
    fresh_backbone,
    get_encoder,
    plain_inputs,
    plain_log_probs,
    plain_logp,
    plain_model,
    plain_model_at,
    prompts_for,
    shared_backbone,
)
from transformers import DynamicCache
from vllm_engines import INSTALLED, NOT_HERE, RECURRENT, child_process, engine_on, in_process, server, tensor_parallel

from mtrl.models.backbone import Backbone
from mtrl.models.forward import Forward
from mtrl.models.load_model import load_model
from mtrl.models.state_dicts import exported_weights
from mtrl.rollout import local
from mtrl.rollout.decode.engine import GraphGenerator
from mtrl.rollout.decode.step import Ops
from mtrl.rollout.local import LocalGenerator
from mtrl.rollout.vllm.generator import VllmGenerator
from mtrl.types import Needs, Sampling, Weights
from mtrl.utils.errors import RunError

pytestmark = pytest.mark.pairwise("family", "engine", "fresh_engine")


def decode_engine(backbone, encoder):
    """The CUDA engine with plain torch kernels; small buckets and frequent polls, so that rows leave."""
    return GraphGenerator(backbone, encoder, ops=Ops(plain, plain), buckets=(16, 32, 64), poll=1)


def vllm_engine(host, family, encoder, may_change=False):
    return engine_on(host(family), family, encoder, may_change=may_change)


ENGINES = {
    "local": lambda family, encoder: LocalGenerator(shared_backbone(family), encoder),
    "decode": lambda family, encoder: decode_engine(shared_backbone(family), encoder),
}
FRESH_ENGINES = {  # may be changed
    "local": lambda family, encoder: LocalGenerator(fresh_backbone(family), encoder),
    "decode": lambda family, encoder: decode_engine(fresh_backbone(family), encoder),
}


def parts_of_one_family(family):
    if family != "qwen2_5_vl":
        pytest.skip("two processes would start for each test; tests/on_vllm/test_weights.py has all families in parts")
    return tensor_parallel(family)


HOSTS = {"vllm": in_process, "vllm_process": child_process, "vllm_server": server, "vllm_parts": parts_of_one_family}
HOSTS = HOSTS if INSTALLED else {}
for name, host in HOSTS.items():  # `make test-vllm`
    ENGINES[name], FRESH_ENGINES[name] = partial(vllm_engine, host), partial(vllm_engine, host, may_change=True)
ALL = [pytest.param(name, marks=pytest.mark.slow if name.startswith("vllm_") else ()) for name in ENGINES]
TOLERANCE = 1e-4 if INSTALLED else 3e-5  # nats; vLLM and the convolutions of some CPUs sum in another order
CUT_TOLERANCE, OUTSIDE = None, 0.0  # of vLLM on a GPU: nats, and the share of tokens outside the cut
NONE = torch.zeros(0, dtype=torch.long)
GREEDY = Sampling(temperature=0, max_new_tokens=12)
SAMPLED = Sampling(n=3, max_new_tokens=12)


OLD_FAMILY = "qwen2_vl"  # same decoder as qwen2_5_vl; run by `make test-all`


# qwen3_5, gemma3: test_family_checks.py and test_mask_rules.py have their greedy tokens, `make test-all` the rest.
QUICK_FAMILIES = [each for each in TINY_FAMILIES if each not in (OLD_FAMILY, "qwen3_5", "gemma3")]


@pytest.fixture(params=slow_but(TINY_FAMILIES, *QUICK_FAMILIES))
def family(request):
    return request.param


@pytest.fixture
def encoder(family):
    return make_encoder(family)


def make_encoder(family):
    """An encoder with many stop tokens, so that responses end early and at different times."""
    encoder = copy.copy(get_encoder(family))
    encoder.stop_ids = tuple(range(4, 512, 7))
    return encoder


def make_engine(engines, name, family, encoder):
    if name in HOSTS and family in RECURRENT:
        pytest.skip("in bfloat16 alone; tests/on_vllm/test_recurrent_vllm.py")
    if name in HOSTS and family in NOT_HERE:
        pytest.skip("tests/on_vllm/test_families_vllm.py")
    return engines[name](family, encoder)


@pytest.fixture(params=ALL)
def engine(request, family, encoder):
    return make_engine(ENGINES, request.param, family, encoder)


@pytest.fixture(params=ALL)
def fresh_engine(request, family, encoder):
    return make_engine(FRESH_ENGINES, request.param, family, encoder)


def same_rows(actual, rows, expected):
    """`rows` of actual are the rows of expected: tokens equal, log-probs within float32 noise."""
    for row, other in zip(rows, range(len(expected)), strict=True):
        length = int(expected.mask[other].sum())
        assert int(actual.mask[row].sum()) == length
        assert torch.equal(actual.tokens[row, :length], expected.tokens[other, :length])
        close(actual.rollout_logprobs[row, :length], expected.rollout_logprobs[other, :length])
        assert actual.text[row] == expected.text[other] and actual.finish_reason[row] == expected.finish_reason[other]


def close(actual, expected, atol=None):
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE if atol is None else atol)


def differ(a, b):
    width = min(a.tokens.shape[1], b.tokens.shape[1])
    return (a.tokens[:, :width] != b.tokens[:, :width]).any(1).float().mean() > 0.5


# ------------------------------------------------------------------------------------------------------------- greedy
def test_greedy_equals_generate_and_a_plain_forward(family, encoder, engine):
    prompts = prompts_for(family)
    rollouts = engine.generate(prompts, GREEDY)
    for row, prompt in enumerate(prompts):
        expected = plain_model(family).generate(
            **plain_inputs(encoder, prompt, NONE),
            do_sample=False,
            max_new_tokens=GREEDY.max_new_tokens,
            suppress_tokens=list(encoder.forbidden_ids) or None,
            eos_token_id=list(encoder.stop_ids),
        )[0, len(prompt.ids) :]
        assert rollouts.tokens[row][rollouts.mask[row]].tolist() == expected.tolist()
    with torch.no_grad():
        close(rollouts.rollout_logprobs, plain_logp(family, rollouts))
    assert len({prompt.ids.shape for prompt in prompts}) > 2, "the prompts are unequal in length"
    stop_early = family not in ("gemma3", "gemma3_text")  # which repeat themselves
    assert len(set(rollouts.mask.sum(1).tolist())) > 1 or not stop_early, "and so are the responses"


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}], ids=str)
def test_extreme_sampling_is_greedy(family, engine, cut):
    prompts = prompts_for(family)
    greedy = engine.generate(prompts, GREEDY)
    if "temperature" in cut and isinstance(engine, VllmGenerator):
        with pytest.raises(RunError, match=r"vLLM does not sample at a temperature of 0\.0001"):
            engine.generate(prompts, replace(GREEDY, **cut))
        return
    sharp = engine.generate(prompts, replace(GREEDY, **{"temperature": 1.0, **cut}))
    assert torch.equal(sharp.tokens, greedy.tokens)
    close(
        sharp.rollout_logprobs, torch.zeros_like(sharp.rollout_logprobs), atol=1e-3
    )  # nothing else could have been sampled


# ---------------------------------------------------------------------------------------------------------- log-probs
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rollout_logprobs_equal_the_trainers(family, encoder, engine, temperature):
    rollouts = engine.generate(prompts_for(family), replace(SAMPLED, temperature=temperature))
    close(
        rollouts.rollout_logprobs, Forward(shared_backbone(family), encoder, temperature).signals(rollouts).old_logprobs
    )
    with torch.no_grad():
        close(rollouts.rollout_logprobs, plain_logp(family, rollouts, temperature=temperature))


@pytest.mark.parametrize("cut", [{"top_k": 12}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.7}], ids=str)
def test_rollout_logprobs_after_a_cut_equal_the_trainers_on_the_support(family, encoder, engine, cut):
    rollouts = engine.generate(prompts_for(family), replace(SAMPLED, temperature=0.7, **cut))
    found = Forward(shared_backbone(family), encoder, 0.7, **cut).signals(rollouts, Needs("old_logprobs", "support"))
    close((found.old_logprobs - found.support).where(rollouts.mask, 0.0), rollouts.rollout_logprobs, atol=CUT_TOLERANCE)
    assert (found.old_logprobs - rollouts.rollout_logprobs).abs().max() > 0.05, "the whole distribution is another one"


@pytest.mark.parametrize("cut", [{}, {"top_k": 5}, {"top_p": 0.5}, {"top_k": 20, "top_p": 0.7}], ids=str)
def test_first_tokens_follow_the_distribution(family, engine, cut):
    """A chi-square test on 2,000 samples of one token (500 for vLLM, which encodes a short prompt for each); the
    log-probs are those of the distribution after the cut."""
    prompt, count = prompts_for(family)[2], 500 if isinstance(engine, VllmGenerator) else 2000
    rollouts = engine.generate([prompt], Sampling(n=count, temperature=0.7, max_new_tokens=1, **cut))
    with torch.no_grad():
        full = plain_log_probs(family, prompt, torch.zeros(1, dtype=torch.long), temperature=0.7)[0].exp().double()
    expected = cut_by_hand(full, **cut)
    drawn = rollouts.tokens[:, 0]
    inside = expected[drawn] > 0
    assert inside.double().mean() >= 1 - OUTSIDE
    close(rollouts.rollout_logprobs[inside, 0], expected.log()[drawn[inside]].float(), atol=CUT_TOLERANCE or 1e-4)
    seen = torch.bincount(drawn, minlength=len(expected)).double()
    common = count * expected >= 5
    seen = torch.cat([seen[common], seen[~common].sum()[None]])
    wanted = torch.cat([count * expected[common], count * expected[~common].sum()[None]])
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    chi_square, freedom = float(((seen - wanted) ** 2 / wanted).sum()), len(wanted) - 1
    assert freedom >= 2
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 4, (chi_square, freedom)


def cut_by_hand(probabilities, top_k=None, top_p=None):
    """The plain definition, token by token in order of probability."""
    kept, mass = [], 0.0
    for token in sorted(range(len(probabilities)), key=lambda i: -float(probabilities[i]))[:top_k]:
        kept.append(token)
    total = sum(float(probabilities[token]) for token in kept)
    nucleus = []
    for token in kept:
        if top_p is not None and mass >= top_p:
            break
        nucleus.append(token)
        mass += float(probabilities[token]) / total
    left = torch.zeros_like(probabilities)
    left[nucleus] = probabilities[nucleus]
    return left / left.sum()


# --------------------------------------------------------------------------------------------------------------- keys
def test_responses_do_not_depend_on_the_batch(family, engine):
    """Alone, in another order, among others, with other n: (seed, step, task, sample) determines the response."""
    prompts = prompts_for(family)
    all_rows = engine.generate(prompts, SAMPLED)
    for i, prompt in enumerate(prompts):
        same_rows(all_rows, range(3 * i, 3 * i + 3), engine.generate([prompt], SAMPLED))
    turned = engine.generate(prompts[::-1], SAMPLED)
    same_rows(all_rows, [9, 10, 11, 6, 7, 8, 3, 4, 5, 0, 1, 2], turned)
    fewer = engine.generate(prompts, replace(SAMPLED, n=1))
    same_rows(all_rows, [0, 3, 6, 9], fewer)
    more = engine.generate(prompts[1:3], replace(SAMPLED, n=5))
    same_rows(more, [0, 1, 2, 5, 6, 7], all_rows.rows(torch.arange(3, 9)))


def test_a_higher_limit_only_adds_tokens(family, engine):
    short, long = (engine.generate(prompts_for(family), replace(SAMPLED, max_new_tokens=limit)) for limit in (5, 12))
    for row in range(len(short)):
        length = int(short.mask[row].sum())
        assert torch.equal(short.tokens[row, :length], long.tokens[row, :length])
        assert long.mask[row].sum() > 5 if short.finish_reason[row] == "length" else long.mask[row].sum() == length


def test_seed_step_and_sample_make_the_difference(family, engine):
    prompts = prompts_for(family)
    rollouts = engine.generate(prompts, SAMPLED)
    assert differ(rollouts, engine.generate(prompts, replace(SAMPLED, seed=2)))
    assert differ(rollouts, engine.generate(prompts, replace(SAMPLED, step=1)))
    by_sample = [rollouts.rows(torch.arange(sample, len(rollouts), 3)) for sample in range(3)]
    assert differ(by_sample[0], by_sample[1]) and differ(by_sample[1], by_sample[2])
    same_rows(rollouts, range(len(rollouts)), engine.generate(prompts, SAMPLED))


def test_sample_numbers_of_a_task_continue_across_calls(family, engine):
    """A step may sample twice: two calls that share counts return the same as one call with every task twice."""
    prompts = prompts_for(family)
    first = engine.generate(prompts, SAMPLED)
    asked = {prompt.task.id: 1 for prompt in prompts}
    second = engine.generate(prompts, replace(SAMPLED, times_sampled=asked))
    both = engine.generate([*prompts, *prompts], SAMPLED)
    same_rows(both, range(12), first)
    same_rows(both, range(12, 24), second)
    assert differ(first, second)
    same_rows(first, range(12), engine.generate(prompts, SAMPLED))  # without counts: copies
    some = engine.generate(prompts, replace(SAMPLED, times_sampled={prompts[1].task.id: 1}))
    same_rows(some, range(3, 6), second.rows(torch.arange(3, 6)))
    same_rows(some, [*range(3), *range(6, 12)], first.rows(torch.tensor([*range(3), *range(6, 12)])))


def test_the_task_makes_the_difference(family, engine):
    """The same prompt under another id is another draw."""
    prompt = prompts_for(family)[0]
    twin = replace(prompt, task=replace(prompt.task, id="another"))
    rollouts = engine.generate([prompt, twin], replace(SAMPLED, n=8))
    assert differ(rollouts.rows(torch.arange(8)), rollouts.rows(torch.arange(8, 16)))


# ----------------------------------------------------------------------------------------------------------- the ends
def test_records_are_complete(family, encoder, engine):
    prompts = prompts_for(family)
    rollouts = engine.generate(prompts, replace(SAMPLED, n=8))
    lengths = rollouts.mask.sum(1)
    assert rollouts.group.tolist() == [i for i in range(4) for _ in range(8)] and rollouts.prompts == tuple(prompts)
    assert torch.equal(rollouts.mask, torch.arange(rollouts.mask.shape[1]) < lengths[:, None])
    assert lengths.min() >= 1 and lengths.max() == rollouts.mask.shape[1] <= 12
    assert (rollouts.tokens[~rollouts.mask] == encoder.pad_id).all() and (
        rollouts.rollout_logprobs[~rollouts.mask] == 0
    ).all()
    assert [rollouts.tokens.dtype, rollouts.mask.dtype, rollouts.rollout_logprobs.dtype] == [
        torch.int64, torch.bool, torch.float32,
    ]  # fmt: skip
    assert rollouts.tokens.device.type == "cpu" and not rollouts.rollout_logprobs.requires_grad
    for row in range(len(rollouts)):
        said = rollouts.tokens[row][rollouts.mask[row]]
        assert rollouts.text[row] == encoder.decode(said)
        stops = torch.isin(said, torch.tensor(encoder.stop_ids))
        assert not stops[:-1].any()  # the first stop token ends the row, and counts
        assert rollouts.finish_reason[row] == ("stop" if stops[-1] else "length")
        assert stops[-1] or len(said) == 12
    assert set(rollouts.finish_reason) == {"stop", "length"}


def test_a_stop_at_the_limit_is_a_stop(family, engine):
    """With a limit exactly where a response stopped, it is not truncated."""
    prompts = prompts_for(family)
    rollouts = engine.generate(prompts, replace(SAMPLED, n=8))
    row = rollouts.finish_reason.index("stop")
    limit = int(rollouts.mask[row].sum())
    cut = engine.generate(prompts, replace(SAMPLED, n=8, max_new_tokens=limit))
    assert cut.finish_reason[row] == "stop" and int(cut.mask[row].sum()) == limit


def test_one_token(family, engine):
    rollouts = engine.generate(prompts_for(family), replace(SAMPLED, max_new_tokens=1))
    assert rollouts.tokens.shape == (12, 1) and rollouts.mask.all()


# ---------------------------------------------------------------------------------------------------------- forbidden
def loud_forbidden(family, encoder):
    """Weights whose embedding (tied to the output) has the forbidden tokens' logits at plus and minus 50 times
    another's; and that embedding."""
    model = plain_model(family)
    matrix = model.get_output_embeddings().weight.detach().clone()
    for place, token in enumerate(encoder.forbidden_ids):
        matrix[token] = matrix[40 + place // 2] * (50 if place % 2 else -50)
    embedding = model.get_input_embeddings().weight.data_ptr()
    weights = exported_weights(model).items()
    return {name: matrix if p.data_ptr() == embedding else p for name, p in weights}, matrix


@pytest.mark.parametrize("family", slow_but(VISION_FAMILIES, *QUICK_FAMILIES), indirect=True)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, replace(SAMPLED, top_k=2, top_p=0.9)], ids=["greedy", "", "cut"])
def test_forbidden_tokens_are_never_sampled(family, encoder, fresh_engine, sampling):
    weights, matrix = loud_forbidden(family, encoder)
    fresh_engine.load(Weights(1, weights))
    prompts = prompts_for(family)
    plain = plain_model_at(checkpoint(family), family)
    plain.get_input_embeddings().weight.data.copy_(matrix)
    for prompt in prompts:
        with torch.no_grad():
            wanted = plain(**plain_inputs(encoder, prompt, NONE)).logits[0, -1].softmax(-1)
        assert wanted[list(encoder.forbidden_ids)].sum() > 0.5, "the model itself would sample nothing else"
    rollouts = fresh_engine.generate(prompts, replace(sampling, version=1))
    assert not torch.isin(rollouts.tokens[rollouts.mask], torch.tensor(encoder.forbidden_ids)).any()
    assert rollouts.rollout_logprobs.isfinite().all()
    if sampling is SAMPLED:
        with torch.no_grad():
            close(rollouts.rollout_logprobs, plain_logp(family, rollouts, model=plain))


# -------------------------------------------------------------------------------------------------- weights, versions
def test_a_version_that_is_not_loaded_is_an_error(family, engine):
    with pytest.raises(RuntimeError, match=r"version 3.*holds 0"):
        engine.generate(prompts_for(family), replace(SAMPLED, version=3))


def test_loaded_weights_speak(family, encoder, fresh_engine):
    """Greedy responses are those of the model with the new weights; the old version is then an error."""
    prompts = prompts_for(family)
    before = fresh_engine.generate(prompts, GREEDY)
    changed = plain_model_at(checkpoint(family), family)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    fresh_engine.load(Weights(1, exported_weights(changed)))
    rollouts = fresh_engine.generate(prompts, replace(GREEDY, version=1))
    assert differ(before, rollouts)
    with torch.no_grad():
        close(rollouts.rollout_logprobs, plain_logp(family, rollouts, model=changed))
    assert rollouts.version.tolist() == [1] * 4 and before.version.tolist() == [0] * 4
    with pytest.raises(RuntimeError):
        fresh_engine.generate(prompts, GREEDY)


def test_a_copy_of_the_weights_changes_nothing(family, fresh_engine):
    prompts = prompts_for(family)
    before = fresh_engine.generate(prompts, SAMPLED)
    copies = {name: tensor.clone() for name, tensor in exported_weights(plain_model(family)).items()}
    fresh_engine.load(Weights(7, copies))
    same_rows(before, range(12), fresh_engine.generate(prompts, replace(SAMPLED, version=7)))


def test_weights_outlast_a_sleep(family, fresh_engine):
    """Loads in one block and samples in the next, also after a failed block; blocks may be nested."""
    prompts, sampling = prompts_for(family), replace(SAMPLED, version=1)
    with fresh_engine.resident():
        unchanged = fresh_engine.generate(prompts, SAMPLED)
        weights = {name: 1.5 * tensor for name, tensor in exported_weights(plain_model(family)).items()}
        fresh_engine.load(Weights(1, weights))
        before = fresh_engine.generate(prompts, sampling)
    assert differ(unchanged, before)
    with pytest.raises(RuntimeError), fresh_engine.resident():
        fresh_engine.generate(prompts, SAMPLED)
    with fresh_engine.resident(), fresh_engine.resident():
        same_rows(before, range(12), fresh_engine.generate(prompts, sampling))


# ---------------------------------------------------------------------------------------------- the local engine alone
@pytest.fixture
def local_engine(family, encoder):
    return LocalGenerator(shared_backbone(family), encoder)


@pytest.mark.parametrize("rows", [1, 4, 6])
def test_rows_at_once_change_nothing(family, encoder, local_engine, rows):
    """Fewer rows than a group, than two groups, exactly two groups."""
    parts = LocalGenerator(shared_backbone(family), encoder, rows_at_once=rows)
    whole = local_engine.generate(prompts_for(family), SAMPLED)
    same_rows(whole, range(12), parts.generate(prompts_for(family), SAMPLED))


def test_finished_rows_leave_and_change_nothing(family, local_engine, monkeypatch):
    prompts, sampling = prompts_for(family), replace(SAMPLED, n=8)
    sizes = []
    select = DynamicCache.reorder_cache
    monkeypatch.setattr(DynamicCache, "reorder_cache", lambda c, i: sizes.append(len(i)) or select(c, i))
    compacted = local_engine.generate(prompts, sampling)
    assert sizes[0] == 32 and len(sizes) > 2 and sizes == sorted(sizes, reverse=True), sizes
    monkeypatch.setattr(local, "COMPACT_BELOW", 0.0)
    sizes.clear()
    same_rows(compacted, range(32), local_engine.generate(prompts, sampling))
    assert sizes == [32]


def test_each_prompt_is_seen_and_read_once(family, local_engine, monkeypatch):
    """For any number of responses per prompt."""
    read, seen = Backbone.forward_text, Backbone.encode_images
    rows, pictures = [], []
    monkeypatch.setattr(
        Backbone, "forward_text", lambda b, ids, *x, **y: rows.append(ids.shape) or read(b, ids, *x, **y)
    )
    monkeypatch.setattr(Backbone, "encode_images", lambda b, inputs: pictures.append(len(inputs)) or seen(b, inputs))
    prompts = prompts_for(family)
    local_engine.generate(prompts, replace(SAMPLED, n=8))
    assert pictures == [4] and rows[0] == (4, max(len(prompt.ids) for prompt in prompts))
    assert all(shape[1] == 1 for shape in rows[1:])


def test_own_tensors_are_left_alone(family, encoder):
    engine = LocalGenerator(fresh_backbone(family), encoder)
    model = engine.backbone.model
    counts = {name: parameter._version for name, parameter in model.named_parameters()}
    engine.load(Weights(1, exported_weights(model)))
    assert counts == {name: parameter._version for name, parameter in model.named_parameters()}
    assert engine.version == 1


def test_an_unknown_or_missing_weight_is_named_and_nothing_is_loaded(family, encoder):
    engine = LocalGenerator(fresh_backbone(family), encoder)
    own = exported_weights(engine.backbone.model)
    before = {name: tensor.clone() for name, tensor in own.items()}
    zeros = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
    with pytest.raises(ValueError, match=r"the model has no weight 'model\.nothing'; do actor and engine hold"):
        engine.load(Weights(1, zeros | {"model.nothing": torch.zeros(1)}))
    del zeros["lm_head.weight"]
    with pytest.raises(ValueError, match=r"the actor publishes no weight 'lm_head\.weight'; do actor and engine hold"):
        engine.load(Weights(1, zeros))
    assert engine.version == 0 and all(torch.equal(own[name], before[name]) for name in own)


def test_eager_attention_gives_the_same_responses(family, encoder, local_engine):
    eager = LocalGenerator(Backbone(load_model(checkpoint(family), attn_implementation="eager")), encoder)
    expected = local_engine.generate(prompts_for(family), SAMPLED)
    same_rows(expected, range(12), eager.generate(prompts_for(family), SAMPLED))


@pytest.mark.parametrize("family", slow_but(TINY_FAMILIES, "qwen2_5_vl"), indirect=True)  # slow on a CPU
def test_half_precision(family, encoder):
    """Records stay float32; engine and trainer agree within what bfloat16 can."""
    backbone = Backbone(load_model(checkpoint(family), dtype="bf16"))
    rollouts = LocalGenerator(backbone, encoder).generate(prompts_for(family), replace(SAMPLED, n=8))
    old = Forward(backbone, encoder).signals(rollouts).old_logprobs
    assert rollouts.rollout_logprobs.dtype == old.dtype == torch.float32
    gap = (old - rollouts.rollout_logprobs)[rollouts.mask].abs()
    assert gap.mean() < 0.1, gap.mean()
