"""LoRA adapters in the graphs of decoding on a GPU, against the plain engine. Skipped without a GPU."""

import pytest
import torch

from mtrl.embedded.embedded_rows import MODEL_DIRECTORY
from mtrl.embedded.task import make_question
from mtrl.models.backbone import Backbone
from mtrl.models.families import load_encoder
from mtrl.models.forward import Forward
from mtrl.models.load_model import load_model
from mtrl.rollout.decode.engine import GraphGenerator, make_fastest_generator
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Sampling
from pretraining.evaluation import make_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("exact_products"),
]
peft = pytest.importorskip("peft")

GREEDY = Sampling(temperature=0, max_new_tokens=24)


@pytest.fixture(scope="module")
def encoder():
    return load_encoder(MODEL_DIRECTORY)


@pytest.fixture(scope="module")
def prompts(encoder):
    return make_prompts([make_question("test", index) for index in range(24)], encoder)


def adapted(dtype):
    """A frozen base with float32 adapters of unequal ranks, two projections without one, B far from zero."""
    model = load_model(MODEL_DIRECTORY, dtype=dtype, device="cuda")
    targets = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    peft.inject_adapter_in_model(peft.LoraConfig(r=8, target_modules=targets, rank_pattern={"v_proj": 3}), model)
    generator = torch.Generator("cuda").manual_seed(0)
    for parameter in adapters(model):
        parameter.data = torch.randn(parameter.shape, device="cuda", generator=generator) / 10
    return Backbone(model)


def adapters(model):
    return [parameter for name, parameter in model.named_parameters() if "lora_" in name]


def test_updates_and_sleeps_are_followed_without_a_capture(encoder, prompts):
    backbone = adapted("fp32")
    decode, plain = make_fastest_generator(backbone, encoder), LocalGenerator(backbone, encoder)
    assert type(decode) is GraphGenerator
    said, captures = set(), []
    for _ in range(3):
        with decode.resident():
            found = decode.generate(prompts, GREEDY)
        expected = plain.generate(prompts, GREEDY)
        assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.mask, expected.mask)
        torch.testing.assert_close(found.rollout_logprobs, expected.rollout_logprobs, rtol=0, atol=1e-3)
        said.add(found.text)
        captures.append(decode.captures)
        with torch.no_grad():
            for parameter in adapters(backbone.model):
                parameter.mul_(-1.1)
                parameter.add_(0.01)
    assert len(said) == 3 and captures[0] == captures[-1]


def test_a_bf16_base_is_held_once_and_log_probs_are_the_trainers(encoder, prompts):
    backbone = adapted("bf16")
    decode = make_fastest_generator(backbone, encoder)
    assert isinstance(decode, GraphGenerator)
    rollouts = decode.generate(prompts, GREEDY)
    small = {id(parameter) for parameter in adapters(backbone.model)}
    assert decode.weights is not None and {id(parameter) for _, parameter in decode.weights.copied} <= small
    exact = Backbone(backbone.model.float())
    exact_logp = Forward(exact, encoder).signals(rollouts).old_logprobs
    narrow = Forward(Backbone(adapted("bf16").model), encoder).signals(rollouts).old_logprobs
    noise = (narrow - exact_logp)[rollouts.mask].abs().mean()
    assert (rollouts.rollout_logprobs - exact_logp)[rollouts.mask].abs().mean() < 2 * noise + 1e-3
