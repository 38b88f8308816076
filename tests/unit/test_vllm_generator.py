"""The vLLM engine without vLLM: its calls of a host, and results of a host that are errors."""

from dataclasses import replace

import pytest
import torch
from tiny_models import get_encoder, plain_model, prompts_for

from mtrl.models.state_dicts import exported_weights
from mtrl.rollout.vllm.generator import VllmGenerator
from mtrl.rollout.vllm.requests import Response, make_requests, make_sampling_params
from mtrl.rollout.vllm.settings import make_llm_arguments
from mtrl.types import Sampling, Weights
from mtrl.utils.errors import Diverged, RunError

FAMILY = "qwen2_5_vl"
SAMPLED = Sampling(n=2, max_new_tokens=4)


class FakeHost:
    """A fake that returns the same tokens every time and records its calls; vLLM may behave differently."""

    max_length = 512

    def __init__(self, sleeps=False):
        self.sleeps, self.calls, self.label, self.logp = sleeps, [], None, -1.0

    def generate(self, requests, params):
        self.calls.append("generate")
        return [[Response([40, 41, 7], [self.logp] * 3, self.label) for _ in range(params["n"])] for _ in requests]

    def load(self, label, tensors):
        self.calls.append("load")
        self.label = label

    def wake(self, to_load=False):
        self.calls.append("wake to load" if to_load else "wake")

    def sleep(self):
        self.calls.append("sleep")

    def close(self):
        self.calls.append("close")


@pytest.fixture
def weights():
    return exported_weights(plain_model(FAMILY))


@pytest.fixture
def engine(weights):
    return VllmGenerator(FakeHost(), get_encoder(FAMILY), weights.keys())


def test_records(engine):
    prompts = prompts_for(FAMILY)
    rollouts = engine.generate(prompts, SAMPLED)
    assert rollouts.tokens.tolist() == [[40, 41, 7]] * 8 and rollouts.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (rollouts.rollout_logprobs == -1).all() and rollouts.prompts == tuple(prompts)


def test_a_version_that_is_not_loaded_is_an_error(engine, weights):
    engine.load(Weights(3, weights))
    with pytest.raises(RuntimeError, match=r"version 2.*holds 3"):
        engine.generate(prompts_for(FAMILY), replace(SAMPLED, version=2))
    assert engine.generate(prompts_for(FAMILY), replace(SAMPLED, version=3)).version.unique().tolist() == [3]


def test_weights_of_somebody_else_are_noticed(engine, weights):
    engine.load(Weights(1, weights))
    engine.host.label = "another:1"
    with pytest.raises(RunError, match="another run loads weights"):
        engine.generate(prompts_for(FAMILY), replace(SAMPLED, version=1))


def test_unknown_and_missing_weights_are_errors_before_anything_is_loaded(engine, weights):
    with pytest.raises(ValueError, match=r"the model has no weight 'model\.nothing'"):
        engine.load(Weights(1, {**weights, "model.nothing": torch.zeros(1)}))
    with pytest.raises(ValueError, match=r"the actor publishes no weight 'lm_head\.weight'"):
        engine.load(Weights(1, {name: each for name, each in weights.items() if name != "lm_head.weight"}))
    assert "load" not in engine.host.calls and engine.version == 0


def test_a_prompt_over_the_length_is_named(engine):
    engine.host.max_length = 40
    with pytest.raises(RunError, match=r"t:2: a prompt of \d+ tokens and 4 new ones exceed the 40"):
        engine.generate(prompts_for(FAMILY), SAMPLED)


@pytest.mark.parametrize("logp", [float("nan"), float("-inf")])
def test_log_probs_that_are_no_numbers_end_the_run(engine, logp):
    engine.host.logp = logp
    with pytest.raises(Diverged, match="weights are broken"):
        engine.generate(prompts_for(FAMILY), SAMPLED)


def test_a_host_that_sleeps_is_used_only_awake(weights):
    """On a GPU; this host is a fake."""
    host = FakeHost(sleeps=True)
    engine = VllmGenerator(host, get_encoder(FAMILY), weights.keys())
    assert host.calls == ["sleep"], "an engine is made asleep"
    with pytest.raises(RuntimeError, match="the engine sleeps"):
        engine.generate(prompts_for(FAMILY), SAMPLED)
    with pytest.raises(RuntimeError, match="the engine sleeps"):
        engine.load(Weights(1, weights))
    with engine.resident(), engine.resident():
        engine.load(Weights(1, weights))
        engine.generate(prompts_for(FAMILY), replace(SAMPLED, version=1))
    engine.close()
    assert host.calls == ["sleep", "wake to load", "load", "wake", "generate", "sleep", "close"]


def test_seeds_are_keyed_by_the_task_and_count_on():
    prompts = prompts_for(FAMILY)
    first = [request.seed for request in make_requests(prompts, SAMPLED)]
    turned = [request.seed for request in make_requests(prompts[::-1], SAMPLED)]
    assert len(set(first)) == 4 and turned == first[::-1]
    again = [request.seed for request in make_requests([*prompts, prompts[0]], SAMPLED)]
    assert again == [*first, first[0] + 2], "the samples of a repeated task differ"
    for change in ({"seed": 5}, {"step": 5}):
        other = [request.seed for request in make_requests(prompts, replace(SAMPLED, **change))]
        assert not set(other) & set(first)


def test_one_pad_an_image_and_the_length_with_all():
    prompts = prompts_for(FAMILY)
    for prompt, request in zip(prompts, make_requests(prompts, SAMPLED), strict=True):
        assert request.ids == prompt.engine_ids.tolist() and request.length == len(prompt.ids)
        assert len(request.images) == len(prompt.media)


def test_the_sampling_parameters():
    encoder = get_encoder(FAMILY)
    params = make_sampling_params(encoder, replace(SAMPLED, top_k=5, top_p=0.5, temperature=0.7))
    assert (params["n"], params["top_k"], params["top_p"], params["temperature"]) == (2, 5, 0.5, 0.7)
    assert params["stop_token_ids"] == sorted(encoder.stop_ids) and params["ignore_eos"] is True
    assert (
        set(params["logit_bias"]) == set(encoder.forbidden_ids) and make_sampling_params(encoder, SAMPLED)["top_k"] == 0
    )
    assert (
        make_sampling_params(get_encoder("qwen2"), SAMPLED)["logit_bias"] is None or get_encoder("qwen2").forbidden_ids
    )


def test_arguments_of_the_engine():
    on_gpu = make_llm_arguments("m", dtype="bfloat16", max_length=99, on_gpu=True, gpu_memory_utilization=0.3)
    assert on_gpu["gpu_memory_utilization"] == 0.3 and on_gpu["enable_sleep_mode"] and on_gpu["max_model_len"] == 99
    on_cpu = make_llm_arguments("m", dtype="float32", max_length=99, extra={"max_model_len": 7, "max_num_seqs": 3})
    assert "enable_sleep_mode" not in on_cpu and on_cpu["enable_chunked_prefill"] is False
    assert (on_cpu["max_model_len"], on_cpu["max_num_seqs"]) == (7, 3), "the user's settings come last"
    assert on_cpu["logprobs_mode"] == on_gpu["logprobs_mode"] == "processed_logprobs"
