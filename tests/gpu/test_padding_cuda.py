"""Padded MLPs of the vision tower on a GPU: close to the plain ones, and faster. Skipped without a GPU."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP

from mtrl.models.patches import use_compiled_pieces, use_padded_mlps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SHAPE_3B = SimpleNamespace(hidden_size=1280, intermediate_size=3420, hidden_act="silu")
PATCHES = 8 * 48 * 48  # 8 images of 672 x 672 pixels
TURNS = 15


def plain_and_padded(weights, compiled, layers=1):
    torch.manual_seed(0)
    with torch.device("cuda"):
        plain = nn.Sequential(*(Qwen2_5_VLMLP(SHAPE_3B, bias=True) for _ in range(layers))).to(weights)
    padded = copy.deepcopy(plain)
    use_padded_mlps(padded)
    if compiled:
        torch._dynamo.reset()
        use_compiled_pieces(plain)
        use_compiled_pieces(padded)
    return plain, padded


def both_ways(module, hidden, gradient):
    """A forward and a backward pass as training makes them: float32 weights under autocast, bf16 ones as they are."""
    master = next(module.parameters()).dtype == torch.float32
    with torch.autocast("cuda", torch.bfloat16, enabled=master):
        output = module(hidden)
    output.backward(gradient)
    return output


def tensors(module, hidden, gradient):
    hidden = hidden.clone().requires_grad_()
    output = both_ways(module, hidden, gradient)
    return {"output": output.detach(), "input": hidden.grad} | {n: p.grad for n, p in module.named_parameters()}


def off(found, expected):
    return {name: float((found[name].double() - x).norm() / x.norm()) for name, x in expected.items()}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_as_close_as_the_plain_ones(weights, compiled):
    plain, padded = plain_and_padded(weights, compiled)
    exact = copy.deepcopy(plain).double()
    exact[0].forward = Qwen2_5_VLMLP.forward.__get__(exact[0])  # nothing compiled
    hidden = torch.randn(1000, 1280, device="cuda", dtype=weights)
    gradient = torch.randn(1000, 1280, device="cuda", dtype=torch.bfloat16)
    expected = {name: x.detach() for name, x in tensors(exact, hidden.double(), gradient.double()).items()}
    theirs, ours = (tensors(module, hidden, gradient) for module in (plain, padded))
    for (name, mine), plain_is_off in zip(off(ours, expected).items(), off(theirs, expected).values(), strict=True):
        assert mine < 1.2 * plain_is_off + 1e-3, name
    for name, parameter in padded.named_parameters():
        assert parameter.grad.shape == parameter.shape and parameter.grad.is_contiguous(), name


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_padding_is_faster(weights, compiled, capsys):
    """The MLP of the 3B model's tower over 8 large images, forward and backward, in turn."""
    modules = dict(zip(("plain", "padded"), plain_and_padded(weights, compiled), strict=True))
    hidden = torch.randn(PATCHES, 1280, device="cuda", dtype=weights, requires_grad=True)
    gradient = torch.randn(PATCHES, 1280, device="cuda", dtype=torch.bfloat16)
    times = {name: [] for name in modules}
    for turn in range(TURNS + 3):
        for name, module in modules.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            module.zero_grad()
            begin.record()
            both_ways(module, hidden, gradient)
            end.record()
            end.synchronize()
            if turn >= 3:  # after compilation and the choice of kernels
                times[name].append(begin.elapsed_time(end))
    plain, padded = (sorted(each)[TURNS // 2] for each in times.values())
    with capsys.disabled():
        print(f"\n{str(weights)[6:]} weights, {'compiled' if compiled else 'plain torch'}: an MLP of 3420 forward and "
              f"backward {plain:.2f} ms, padded {padded:.2f} ms ({plain / padded:.2f} times as fast)")  # fmt: skip
    assert padded < plain
