"""Qwen3.5 on vLLM's CPU build, whose kernels for recurrent layers are in bfloat16: as close to the trainer as that."""

import pytest
import torch
from tiny_models import checkpoint, get_encoder, plain_log_probs, plain_model_at, prompts_for
from vllm_engines import INSTALLED, engine_on, in_process

from mtrl.models.backbone import Backbone
from mtrl.models.forward import Forward
from mtrl.models.state_dicts import exported_weights
from mtrl.types import Sampling, Weights

pytestmark = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")

# Mean distance of log-probs in nats, to a trainer in float32. Rounding makes 0.03; where it flips an expert, more. With
# other weights than the trainer's it is 1.
ROUNDING = {"qwen3_5": 0.06, "qwen3_5_moe": 0.2}
OTHER_WEIGHTS = 0.5


@pytest.fixture(params=ROUNDING)
def family(request):
    return request.param


def gap(family, engine, model, version):
    rollouts = engine.generate(prompts_for(family), Sampling(n=4, max_new_tokens=8, version=version, step=version))
    old = Forward(Backbone(model), get_encoder(family)).signals(rollouts).old_logprobs
    return float((old - rollouts.rollout_logprobs)[rollouts.mask].abs().mean())


def pack_experts_again(model):
    """vLLM packs experts for its CPU kernel only where it makes that kernel, so it must make it again."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def changed_model(family, version):
    model, noise = plain_model_at(checkpoint(family), family), torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=noise))
    return model


def test_samples_are_the_trainers(family):
    engine, model = engine_on(in_process(family), family), plain_model_at(checkpoint(family), family)
    assert gap(family, engine, model, 0) < ROUNDING[family]
    greedy = engine.generate(prompts_for(family), Sampling(temperature=0, max_new_tokens=8))
    behind = []  # nats by which a token is less probable than the trainer's best: rounding decides near ties
    for row, prompt in enumerate(greedy.prompts):
        said = greedy.tokens[row][greedy.mask[row]]
        with torch.no_grad():
            log_probs = plain_log_probs(family, prompt, said)
        behind.append(log_probs.amax(-1) - log_probs.gather(-1, said[:, None])[:, 0])
    assert torch.cat(behind).mean() < ROUNDING[family]


def test_updates_arrive(family):
    host = in_process(family)
    engine, start = engine_on(host, family, may_change=True), plain_model_at(checkpoint(family), family)
    for version in (1, 2):
        model = changed_model(family, version)
        host.llm.apply_model(pack_experts_again)
        engine.load(Weights(version, exported_weights(model)))
        assert gap(family, engine, model, version) < ROUNDING[family]
        assert gap(family, engine, start, version) > OTHER_WEIGHTS, "the old weights would respond differently"


def test_new_experts_are_not_packed():
    """Even the same ones are lost, which is why `compose/vllm_engine.py` refuses them on a CPU. When this fails, that
    refusal can go."""
    family = "qwen3_5_moe"
    engine, model = engine_on(in_process(family), family, may_change=True), plain_model_at(checkpoint(family), family)
    engine.load(Weights(1, exported_weights(model)))
    assert gap(family, engine, model, 1) > OTHER_WEIGHTS
