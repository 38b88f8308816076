"""bf16 weights that follow float32: by stochastic rounding, or by storing the rounding error."""

import copy
import math

import pytest
import torch

from mtrl.compose.algorithm import make_optimizer_settings
from mtrl.config import ConfigError, find_warnings, load_config
from mtrl.workers import optimizers
from mtrl.workers.learner import OptimizerSettings, make_optimizer
from mtrl.workers.optimizers import Noise, RoundedAdamW, add_compensated, round_at_random

ULP = 2**-7  # between two bf16 numbers from 1 to 2


def drawn(seed=0):
    return torch.Generator().manual_seed(seed)


def rounded(numbers, dtype=torch.bfloat16):
    return round_at_random(numbers, dtype, Noise(drawn(), len(numbers), slice(None)))


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=drawn(seed))


# ------------------------------------------------------------------------------------------------------------ rounding
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.9])
def test_the_mean_stays(share, sign):
    """A number at a fraction of the way between two is rounded up with that probability. Over 100,000 draws the share
    has a standard deviation of at most 0.0016."""
    numbers = torch.full((100_000,), sign * (1 + share * ULP))
    found = rounded(numbers).float() * sign
    assert set(found.tolist()) <= {1.0, 1 + ULP}
    assert float((found > 1).float().mean()) == pytest.approx(share, abs=0.01 if share else 0)


def test_bf16_numbers_stay():
    numbers = noise(1000).bfloat16()
    assert torch.equal(rounded(numbers.float()), numbers)
    assert rounded(torch.zeros(3)).tolist() == [0, 0, 0]
    assert torch.equal(rounded(noise(9), torch.float32), noise(9)), "float32 needs no rounding"


def test_rounding_errors_accumulate():
    """A hundred updates of a hundredth of the spacing move the weight by one spacing."""
    weight, lost = torch.ones(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)
    plain = weight.clone()
    for _ in range(100):
        add_compensated(weight, torch.tensor([ULP / 100]), lost)
        plain += ULP / 100
    assert float(weight + lost) == pytest.approx(1 + ULP, rel=1e-2 * ULP) and float(weight) == 1 + ULP
    assert float(plain) == 1, "which the plain sum never sees"


# ------------------------------------------------------------------------------------------------------------ following
def descend(kind, dtype, steps=200, lr=1e-4, **settings):
    """AdamW towards a target a few hundred steps away; gradients are noisy, as in training. Returns the weights."""
    start = (0.5 * noise(64, 32)).bfloat16().float()
    target = start + 0.03 * noise(64, 32, seed=1).sign()
    weight = torch.nn.Parameter(start.to(dtype, copy=True))
    optimizer = make_optimizer([weight], OptimizerSettings(lr=lr, param_rounding=kind, **settings), fused=False)
    for step in range(steps):
        weight.grad = (weight.detach().float() - target + 0.02 * noise(64, 32, seed=step)).to(dtype)
        optimizer.step()
    return weight.detach().float(), start


def moved(weight, start, expected):
    """How far the weights went along the way that float32 went: 1 is as far."""
    way = expected - start
    return float(((weight - start) * way).sum() / (way * way).sum())


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
def test_bf16_follows_float32(betas):
    expected, start = descend("none", torch.float32, betas=betas)
    assert float((expected - start).abs().mean()) > 0.01, "it goes somewhere"
    lost = moved(descend("none", torch.bfloat16, betas=betas)[0], start, expected)
    assert lost < 0.1, "plain bf16 loses nearly everything"
    for kind in ("stochastic", "kahan"):
        found, _ = descend(kind, torch.bfloat16, betas=betas)
        assert moved(found, start, expected) == pytest.approx(1, abs=0.03), kind
    nearest = expected.bfloat16().float()
    assert float((found - expected).abs().mean()) < 2 * float((nearest - expected).abs().mean()) + 2e-4, (
        "kahan stays by it"
    )


@pytest.mark.parametrize("kind", ["stochastic", "kahan"])
def test_in_float32_it_is_adamw(kind, monkeypatch):
    """The formula against torch's own; pieces of any size cover everything."""
    plain, _ = descend("none", torch.float32, steps=20, lr=0.01, weight_decay=0.1)
    found, _ = descend(kind, torch.float32, steps=20, lr=0.01, weight_decay=0.1)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(optimizers, "CHUNK", 700)
    in_pieces, _ = descend(kind, torch.float32, steps=20, lr=0.01, weight_decay=0.1)
    torch.testing.assert_close(in_pieces, found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["stochastic", "kahan"])
def test_a_resumed_run_draws_the_same_numbers(kind):
    def optimizer_for(weight):
        return RoundedAdamW([weight], lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01, rounding=kind)

    def go(weight, optimizer, steps):
        for step in steps:
            weight.grad = noise(40, seed=step).bfloat16()
            optimizer.step()

    whole, half = (torch.nn.Parameter(noise(40).bfloat16()) for _ in range(2))
    one, first = optimizer_for(whole), optimizer_for(half)
    go(whole, one, range(6))
    go(half, first, range(3))
    saved, rest = copy.deepcopy(first.state_dict()), torch.nn.Parameter(half.detach().clone())
    second = optimizer_for(rest)
    second.load_state_dict(saved)
    go(rest, second, range(3, 6))
    assert torch.equal(rest, whole)
    for kind_of_state, tensor in one.state[whole].items():
        assert torch.equal(tensor, second.state[rest][kind_of_state])
    others = torch.nn.Parameter(noise(40).bfloat16())
    go(others, optimizer_for(others), range(6))
    assert torch.equal(others, whole), "and a run that is repeated too"


def test_parameters_without_a_gradient_stay():
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    RoundedAdamW([weight], lr=1.0, betas=(0.9, 0.95), weight_decay=1.0, rounding="kahan").step()
    assert weight.tolist() == [1, 1, 1]


# -------------------------------------------------------------------------------------------------------- configuration
def test_the_key_reaches_the_optimizer_and_ends_the_warning():
    keys = ["worker.actor.fsdp.param_dtype=bf16", "worker.actor.fsdp.param_rounding=kahan"]
    config = load_config(None, keys)
    settings = make_optimizer_settings(config, 1)
    assert settings.param_rounding == "kahan" and list(find_warnings(config)) == []
    weight = torch.nn.Parameter(torch.zeros(1))
    assert isinstance(make_optimizer([weight], settings, fused=False), RoundedAdamW)
    (said,) = find_warnings(load_config(None, keys[:1]))
    assert "set worker.actor.fsdp.param_rounding to kahan or stochastic" in said


def test_float32_weights_lose_nothing():
    with pytest.raises(ConfigError, match="float32 weights need no rounding"):
        load_config(None, ["worker.actor.fsdp.param_rounding=stochastic"])
    assert math.isclose(ULP, float(torch.finfo(torch.bfloat16).eps))
