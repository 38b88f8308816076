"""The gated delta rule against its recurrence token by token, and states that responses fork from their prompt."""

import copy
from types import SimpleNamespace

import pytest
import torch
from tiny_models import fresh_backbone, get_encoder, prompts_for, random_rollouts
from transformers import AutoConfig, AutoModelForCausalLM

from mtrl.models.backbone import Backbone, check_supported
from mtrl.models.delta_rule import gated_delta_rule
from mtrl.models.document_mask import DocumentMask
from mtrl.models.forward import Forward
from mtrl.models.layer_kinds import attention_layers
from mtrl.models.model_size import model_size
from mtrl.models.recurrent import StateForks

CPU = torch.device("cpu")
NAMES = ("query", "key", "value", "g", "beta", "initial_state")


def draw(length, rows=2, heads=3, keys=5, values=4, dtype=torch.float64):
    torch.manual_seed(length)
    wide = [torch.randn(rows, length, heads, width, dtype=dtype) for width in (keys, keys, values)]
    decay = -torch.rand(rows, length, heads, dtype=dtype) * 3
    state = torch.randn(rows, heads, keys, values, dtype=dtype)
    return [each.requires_grad_() for each in (*wide, decay, torch.rand(rows, length, heads, dtype=dtype), state)]


def token_by_token(query, key, value, g, beta, state):
    query, key = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (query, key))
    outputs = []
    for t in range(query.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        error = value[:, t] - torch.einsum("rhk,rhkv->rhv", key[:, t], state)
        state = state + torch.einsum("rhk,rhv->rhkv", key[:, t], error * beta[:, t, :, None])
        outputs.append(torch.einsum("rhk,rhkv->rhv", query[:, t], state) * query.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 130])
def test_chunks_equal_the_recurrence(length):
    inputs = draw(length)
    expected, found = token_by_token(*inputs), gated_delta_rule(*inputs, output_final_state=True)
    for theirs, ours in zip(expected, found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    weights = [torch.randn_like(each) for each in expected]
    gradients = [
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(each, weights, strict=True)), inputs)
        for each in (expected, found)
    ]
    for name, theirs, ours in zip(NAMES, *gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9, msg=name)


def test_autocast_does_not_narrow_the_state():
    inputs = [each.detach().float() for each in draw(70)]
    expected = gated_delta_rule(*inputs, output_final_state=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = gated_delta_rule(*inputs, output_final_state=True)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_padding_leaves_the_state_alone():
    query, key, value, g, beta, state = (each.detach() for each in draw(40))
    _, expected = gated_delta_rule(*(each[:, :25] for each in (query, key, value, g, beta)), state, True)
    g[:, 25:], beta[:, 25:] = 0, 0
    _, found = gated_delta_rule(query, key, value, g, beta, state, True)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_forks_of_two_sequences():
    """The first: a prompt of 4 and two responses. The second: a prompt of 2, a response, and padding."""
    segment = torch.tensor([[0, 0, 0, 0, 1, 1, 2], [3, 3, 4, 4, 4, -1, -1]])
    prompt = torch.tensor([[0, 0, 0, 0, 0, 0, 0], [3, 3, 3, 3, 3, -1, -1]])
    forks = StateForks.from_mask(DocumentMask(segment, prompt), CPU)
    assert forks.prompts.index.tolist() == [[0, 1, 2, 3], [7, 8, 8, 8]]
    assert forks.prompts.is_real.tolist() == [[True] * 4, [True, True, False, False]]
    assert forks.responses.index.tolist() == [[4, 5, 5], [6, 6, 6], [9, 10, 11]]
    assert forks.parent.tolist() == [0, 0, 1]
    assert forks.tail.tolist() == [[1, 2, 3], [-1, 7, 8]], "the second prompt has only two inputs"
    padded = torch.cat([forks.prompts.index.flatten(), forks.responses.index.flatten()])
    real = segment.flatten() >= 0
    assert padded[forks.place][real].tolist() == real.nonzero()[:, 0].tolist()


def test_in_float64_sharing_is_exact():
    """Rounding aside: in float32 both routes are equally far from these numbers. (Experts' grouped products have no
    float64.)"""
    family = "qwen3_5"
    backbone = Backbone(copy.deepcopy(fresh_backbone(family).model).double())
    rollouts = random_rollouts(prompts_for(family), [0, 0, 1, 1, 2, 3], [70, 3, 1, 12, 65, 2])
    found = []
    for share in (True, False):
        backbone.model.zero_grad()
        logp = Forward(backbone, get_encoder(family), share_prefix=share).logp(rollouts)
        (logp * torch.linspace(-1, 2, logp.numel()).view_as(logp)).sum().backward()
        found.append((logp.detach(), {name: p.grad.clone() for name, p in backbone.model.named_parameters()}))
    (shared, theirs), (plain, gradients) = found
    torch.testing.assert_close(shared, plain, rtol=0, atol=2e-6)  # some norms compute in float32
    for name, gradient in gradients.items():
        torch.testing.assert_close(theirs[name], gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()), msg=name)


def test_the_layers_with_attention():
    assert attention_layers(SimpleNamespace(num_hidden_layers=3)) == [0, 1, 2]
    kinds = ["linear_attention", "full_attention"] * 2
    assert attention_layers(SimpleNamespace(num_hidden_layers=4, layer_types=kinds)) == [1, 3]


def test_the_states_of_a_row_are_counted():
    """Three recurrent layers of 4 value heads and 2 key heads of 16: states, and 4 inputs of the convolution."""
    size = model_size(fresh_backbone("qwen3_5").model)
    assert size.layers == 3 and size.state == 3 * (4 * 16 * 16 + 4 * (2 * 2 * 16 + 4 * 16))


def test_other_recurrent_layers_are_refused():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = AutoConfig.for_model("lfm2", **sizes, num_attention_heads=2, num_key_value_heads=2, full_attn_idxs=[1])
    with pytest.raises(ValueError, match="layers of the kind conv"):
        check_supported(AutoModelForCausalLM.from_config(config))
