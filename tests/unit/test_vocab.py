"""Chunked log-probs, entropy and KL against plain ones that hold all logits; and their memory."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.measure import compiled_graphs
from mtrl.algorithms import vocab
from mtrl.algorithms.vocab import (
    COMPARED,
    compare_distributions,
    full_kl,
    map_log_probs,
    support_mass,
    token_scores,
)
from mtrl.memory.live_tensors import LiveTensors
from mtrl.models.forward import find_row_dims
from mtrl.models.patches import compile_function

POSITIONS, VOCABULARY, WIDTH = 11, 23, 6
FORBIDDEN = torch.tensor([0, 7, 22])


def make(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [11, 6], weight [23, 6] (leaves) and targets [11], none of them forbidden."""
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(POSITIONS, WIDTH, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=draw).to(dtype).requires_grad_()
    allowed = torch.tensor([i for i in range(VOCABULARY) if i not in FORBIDDEN.tolist()])
    return hidden, weight, allowed[torch.randint(len(allowed), (POSITIONS,), generator=draw)]


def plain_log_probs(
    hidden: Tensor, weight: Tensor, temperature: float, forbidden: Tensor | None, softcap: float = math.inf
) -> Tensor:
    logits = (hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32))
    if softcap < math.inf:
        logits = softcap * (logits / softcap).tanh()
    logits = logits / temperature
    if forbidden is not None:
        barred = torch.zeros(len(weight), dtype=torch.bool)
        barred[forbidden] = True
        logits = logits.masked_fill(barred, -torch.inf)
    return logits.log_softmax(-1)


def plain_entropy(log_probs: Tensor) -> Tensor:
    terms = torch.where(log_probs == -torch.inf, 0.0, log_probs.exp() * log_probs)
    return -terms.sum(-1)


def plain_kl(p: Tensor, q: Tensor) -> Tensor:
    allowed = (p > -torch.inf).all(0)  # picked, not masked: the gradient of inf - inf is NaN even under a mask
    p, q = p[:, allowed], q[:, allowed]
    return (p.exp() * (p - q)).sum(-1)


def gradients(value: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    """Gradients of a sum with a different weight for every position, so that swapped positions show."""
    return torch.autograd.grad((value * torch.linspace(-1.0, 2.0, len(value)).to(value)).sum(), leaves)


options = pytest.mark.parametrize(
    ("temperature", "forbidden"), [(1.0, None), (0.7, None), (1.0, FORBIDDEN), (1.3, FORBIDDEN)]
)
chunks = pytest.mark.parametrize("chunk", [1, 4, 5, 11, 512])  # 4 and 5 do not divide 11


@options
@chunks
def test_token_scores_and_gradients(temperature: float, forbidden: Tensor | None, chunk: int) -> None:
    hidden, weight, targets = make()
    scores = token_scores(
        hidden, weight, targets, temperature=temperature, forbidden=forbidden, entropy=True, chunk=chunk
    )
    plain = plain_log_probs(hidden, weight, temperature, forbidden)
    logp = plain[torch.arange(POSITIONS), targets]
    torch.testing.assert_close(scores.logp, logp)
    assert scores.entropy is not None and not scores.entropy.requires_grad
    torch.testing.assert_close(scores.entropy, plain_entropy(plain).detach())
    torch.testing.assert_close(gradients(scores.logp, hidden, weight), gradients(logp, hidden, weight))


@pytest.mark.slow  # compiles for a minute
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_chunks_give_the_same_numbers(dtype: torch.dtype) -> None:
    """With one graph for chunks of all sizes."""
    hidden, weight, targets = make(dtype)
    rules: Any = {"temperature": 0.7, "forbidden": FORBIDDEN, "entropy": True, "chunk": 4}
    expected = token_scores(hidden, weight, targets, **rules)
    before = compiled_graphs()
    found = token_scores(hidden, weight, targets, **rules, fuse=partial(compile_function, dynamic_dims=find_row_dims))
    assert compiled_graphs() == before + 1
    torch.testing.assert_close(found.logp, expected.logp)
    torch.testing.assert_close(found.entropy, expected.entropy)
    torch.testing.assert_close(gradients(found.logp, hidden, weight), gradients(expected.logp, hidden, weight))
    assert compiled_graphs() == before + 2  # and one for the gradients


@options
@chunks
@pytest.mark.parametrize("own_matrix", [True, False])
def test_full_kl_and_gradients(temperature: float, forbidden: Tensor | None, chunk: int, own_matrix: bool) -> None:
    hidden, weight, _ = make()
    other_hidden, other_weight, _ = make(seed=1)
    if not own_matrix:
        other_weight = weight
    kl = full_kl(
        hidden,
        other_hidden,
        weight,
        other_weight if own_matrix else None,
        temperature=temperature,
        forbidden=forbidden,
        chunk=chunk,
    )
    p = plain_log_probs(hidden, weight, temperature, forbidden)
    q = plain_log_probs(other_hidden, other_weight, temperature, forbidden).detach()  # q is a constant
    torch.testing.assert_close(kl, plain_kl(p, q))
    assert (kl > 0).all()
    torch.testing.assert_close(gradients(kl, hidden, weight), gradients(plain_kl(p, q), hidden, weight))


@pytest.mark.parametrize("forbidden", [None, FORBIDDEN])
def test_finite_differences(forbidden: Tensor | None) -> None:
    hidden, weight, targets = make()
    other_hidden, other_weight, _ = make(seed=1)

    def logp(hidden: Tensor, weight: Tensor) -> Tensor:
        return token_scores(hidden, weight, targets, temperature=0.8, forbidden=forbidden, chunk=4).logp

    def kl(hidden: Tensor, weight: Tensor) -> Tensor:
        return full_kl(hidden, other_hidden, weight, other_weight, temperature=0.8, forbidden=forbidden, chunk=4)

    assert torch.autograd.gradcheck(logp, (hidden, weight))
    assert torch.autograd.gradcheck(kl, (hidden, weight))


CAP = 1.5  # logits of up to 5: most are bent, some almost flat


@options
@chunks
def test_capped_logits(temperature: float, forbidden: Tensor | None, chunk: int) -> None:
    """In every function of this module, with gradients where it has any."""
    hidden, weight, targets = make()
    other_hidden, other_weight, _ = make(seed=1)
    rules: Any = {"temperature": temperature, "forbidden": forbidden, "softcap": CAP, "chunk": chunk}

    def capped(hidden: Tensor, weight: Tensor = weight) -> Tensor:
        return plain_log_probs(hidden, weight, temperature, forbidden, CAP)

    scores = token_scores(hidden, weight, targets, entropy=True, **rules)
    logp = capped(hidden)[range(POSITIONS), targets]
    torch.testing.assert_close((scores.logp, scores.entropy), (logp, plain_entropy(capped(hidden)).detach()))
    torch.testing.assert_close(gradients(scores.logp, hidden, weight), gradients(logp, hidden, weight))
    assert not torch.allclose(logp, plain_log_probs(hidden, weight, temperature, forbidden)[range(POSITIONS), targets])

    kl = full_kl(hidden, other_hidden, weight, other_weight, **rules)
    plain = plain_kl(capped(hidden), capped(other_hidden, other_weight).detach())
    torch.testing.assert_close(kl, plain)
    torch.testing.assert_close(gradients(kl, hidden, weight), gradients(plain, hidden, weight))

    compared = compare_distributions(hidden, other_hidden, weight, ["kl"], **rules)["kl"]
    plain, leaves = plain_kl(capped(hidden), capped(other_hidden)), (hidden, other_hidden, weight)
    torch.testing.assert_close(compared, plain)
    torch.testing.assert_close(gradients(compared, *leaves), gradients(plain, *leaves))

    highest = capped(hidden).max(-1)
    best = support_mass(hidden, weight, highest.indices, top_p=1.0, top_k=1, **rules)
    mapped = map_log_probs(hidden, weight, targets, lambda log_probs, _: log_probs.max(-1).values, **rules)
    torch.testing.assert_close((best, mapped), (highest.values.detach(),) * 2)


def test_capped_finite_differences() -> None:
    hidden, weight, targets = make()
    assert torch.autograd.gradcheck(
        lambda *given: token_scores(*given, targets, temperature=0.8, forbidden=FORBIDDEN, softcap=CAP, chunk=4).logp,
        (hidden, weight),
    )


def test_by_hand() -> None:
    """One position, H = 1, logits (0, ln 3, ln 4) at temperature 1/2, i.e. weights 1, 9, 16 of 26; without the last
    one 1, 9 of 10, so log 0.9, and entropy -(0.9 ln 0.9 + 0.1 ln 0.1)."""
    hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [math.log(3)], [math.log(4)]])
    target = torch.tensor([1])
    free = token_scores(hidden, weight, target, temperature=0.5)
    assert free.logp.item() == pytest.approx(math.log(9 / 26), abs=1e-6) and free.entropy is None
    barred = token_scores(hidden, weight, target, temperature=0.5, forbidden=torch.tensor([2]), entropy=True)
    assert barred.logp.item() == pytest.approx(math.log(0.9), abs=1e-6)
    assert barred.entropy is not None
    assert barred.entropy.item() == pytest.approx(-(0.9 * math.log(0.9) + 0.1 * math.log(0.1)), abs=1e-6)
    # against equal logits, without the last: KL((0.1, 0.9) || (0.5, 0.5)) = ln 2 - entropy
    kl = full_kl(hidden, torch.zeros(1, 1), weight, temperature=0.5, forbidden=torch.tensor([2]))
    assert kl.item() == pytest.approx(math.log(2) - barred.entropy.item(), abs=1e-6)


def test_equal_sides_have_exactly_zero_divergence() -> None:
    hidden, weight, _ = make(torch.float32)
    assert full_kl(hidden, hidden, weight, forbidden=FORBIDDEN, chunk=4).tolist() == [0.0] * POSITIONS


def test_forbidden_ids_stay_finite() -> None:
    """Only one id allowed: log-prob 0, entropy 0, no gradient, no NaN. A forbidden target is -inf, and a constant."""
    hidden, weight, _ = make(torch.float32)
    everything_but_3 = torch.tensor([i for i in range(VOCABULARY) if i != 3])
    targets = torch.full((POSITIONS,), 3)
    scores = token_scores(hidden, weight, targets, forbidden=everything_but_3, entropy=True, chunk=4)
    assert scores.entropy is not None
    assert scores.logp.tolist() == scores.entropy.tolist() == [0.0] * POSITIONS
    assert all((grad == 0).all() for grad in gradients(scores.logp, hidden, weight))

    barred = token_scores(hidden, weight, torch.full((POSITIONS,), 7), forbidden=FORBIDDEN, entropy=True)
    assert (barred.logp == -torch.inf).all()
    assert barred.entropy is not None and barred.entropy.isfinite().all()
    grad_hidden, grad_weight = gradients(barred.logp, hidden, weight)
    assert grad_hidden.isfinite().all() and (grad_weight[FORBIDDEN] == 0).all()


def test_large_logits_neither_overflow_nor_vanish() -> None:
    hidden, weight, targets = make(torch.float32)
    scores = token_scores(hidden * 300, weight, targets, forbidden=FORBIDDEN, entropy=True, chunk=4)
    plain = plain_log_probs(hidden * 300, weight, 1.0, FORBIDDEN)
    assert scores.entropy is not None and scores.entropy.isfinite().all() and (scores.entropy >= 0).all()
    assert scores.logp.min() < -100
    torch.testing.assert_close(scores.logp, plain[torch.arange(POSITIONS), targets])
    assert all(grad.isfinite().all() for grad in gradients(scores.logp, hidden, weight))


def test_no_positions() -> None:
    hidden, weight = torch.zeros(0, WIDTH, requires_grad=True), torch.randn(VOCABULARY, WIDTH).requires_grad_()
    targets = torch.zeros(0, dtype=torch.long)
    scores = token_scores(hidden, weight, targets, entropy=True)
    kl = full_kl(hidden, torch.zeros(0, WIDTH), weight)
    assert scores.entropy is not None
    assert scores.logp.shape == scores.entropy.shape == kl.shape == (0,)
    grad_hidden, grad_weight = torch.autograd.grad(scores.logp.sum() + kl.sum(), (hidden, weight))
    assert grad_hidden.shape == (0, WIDTH) and (grad_weight == 0).all() and grad_weight.shape == weight.shape


@pytest.mark.parametrize("function", ["token_scores", "full_kl"])
def test_frozen_inputs_cost_no_gradient(function: str) -> None:
    hidden, weight, targets = make()

    def value(hidden: Tensor, weight: Tensor) -> Tensor:
        if function == "token_scores":
            return token_scores(hidden, weight, targets, chunk=4).logp
        return full_kl(hidden, hidden.detach().flip(0), weight, chunk=4)

    both = gradients(value(hidden, weight), hidden, weight)
    torch.testing.assert_close(gradients(value(hidden, weight.detach()), hidden), both[:1])
    torch.testing.assert_close(gradients(value(hidden.detach(), weight), weight), both[1:])
    assert not value(hidden.detach(), weight.detach()).requires_grad
    with torch.no_grad():
        assert not value(hidden, weight).requires_grad


def test_half_precision() -> None:
    """bf16 products, all else in float32: values equal the plain version's, gradients are near those of float32."""
    hidden, weight, targets = make(torch.bfloat16)
    scores = token_scores(hidden, weight, targets, temperature=0.7, forbidden=FORBIDDEN, entropy=True, chunk=4)
    plain = plain_log_probs(hidden, weight, 0.7, FORBIDDEN)
    assert scores.entropy is not None and scores.logp.dtype == scores.entropy.dtype == torch.float32
    torch.testing.assert_close(scores.logp, plain[torch.arange(POSITIONS), targets])
    torch.testing.assert_close(scores.entropy, plain_entropy(plain))

    kl = full_kl(hidden, hidden.detach().flip(0), weight, chunk=4)
    assert kl.dtype == torch.float32
    precise_hidden, precise_weight = (x.detach().float().requires_grad_() for x in (hidden, weight))
    precise = plain_log_probs(precise_hidden, precise_weight, 0.7, FORBIDDEN)[torch.arange(POSITIONS), targets]
    p = plain_log_probs(precise_hidden, precise_weight, 1.0, None)
    precise_kl = plain_kl(p, p.detach().flip(0))
    for ours, exact in ((scores.logp, precise), (kl, precise_kl)):
        for grad, exact_grad in zip(
            gradients(ours, hidden, weight), gradients(exact, precise_hidden, precise_weight), strict=True
        ):
            assert grad.dtype == torch.bfloat16
            torch.testing.assert_close(grad.float(), exact_grad, rtol=0.05, atol=0.05 * float(exact_grad.abs().max()))


def test_weight_gradient_is_summed_in_float32() -> None:
    """256 + 1 is 256 in bf16: one position a chunk, 300 equal gradients of 1/2 would stop growing at 128."""
    hidden = torch.ones(300, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    token_scores(hidden, weight, torch.zeros(300, dtype=torch.long), chunk=1).logp.sum().backward()
    assert weight.grad is not None and weight.grad.flatten().tolist() == [150.0, -150.0]


def test_mixed_dtypes_use_that_of_hidden() -> None:
    hidden, weight, targets = make(torch.float32)
    half = hidden.detach().bfloat16().requires_grad_()
    scores = token_scores(half, weight, targets, chunk=4)
    expected = token_scores(half, weight.bfloat16(), targets, chunk=4)
    assert torch.equal(scores.logp, expected.logp)
    grad_hidden, grad_weight = gradients(scores.logp, half, weight)
    assert grad_hidden.dtype == torch.bfloat16 and grad_weight.dtype == torch.float32
    assert torch.equal(full_kl(half, hidden, weight), full_kl(half, hidden, weight.bfloat16(), weight))


def test_autocast_has_no_effect() -> None:
    hidden, weight, targets = make(torch.float32)
    plain = token_scores(hidden, weight, targets, chunk=4).logp
    grads = gradients(plain, hidden, weight)
    kl = full_kl(hidden, hidden.flip(0), weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = token_scores(hidden, weight, targets, chunk=4).logp
        assert torch.equal(cast, plain)
        assert all(map(torch.equal, gradients(cast, hidden, weight), grads))
        assert torch.equal(full_kl(hidden, hidden.flip(0), weight), kl)


def test_memory_layout_does_not_matter() -> None:
    hidden, weight, targets = make()
    expected = gradients(token_scores(hidden, weight, targets, chunk=4).logp, hidden, weight)
    turned = hidden.detach().T.contiguous().T.requires_grad_()
    spread = torch.repeat_interleave(weight.detach(), 2, 0)[::2].requires_grad_()
    strided_targets = torch.stack([targets, targets], 1)[:, 0]
    assert not turned.is_contiguous() and not spread.is_contiguous() and not strided_targets.is_contiguous()
    actual = gradients(token_scores(turned, spread, strided_targets, chunk=4).logp, turned, spread)
    torch.testing.assert_close(actual, expected)


def test_a_second_derivative_is_an_error() -> None:
    hidden, weight, targets = make()
    logp = token_scores(hidden, weight, targets).logp
    (grad,) = torch.autograd.grad((logp**2).sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    """The ids may stay on the CPU; results as on the CPU; the peak stays near the stated buffers."""
    hidden, weight, targets = make(dtype)
    on_cpu = token_scores(hidden, weight, targets, temperature=0.7, forbidden=FORBIDDEN, entropy=True, chunk=4)
    on_gpu = token_scores(
        hidden.cuda(), weight.cuda(), targets.cuda(), temperature=0.7, forbidden=FORBIDDEN, entropy=True, chunk=4
    )
    assert on_cpu.entropy is not None and on_gpu.entropy is not None and on_gpu.logp.is_cuda
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.05}
    torch.testing.assert_close(on_gpu.logp.cpu(), on_cpu.logp, **tolerance)
    torch.testing.assert_close(on_gpu.entropy.cpu(), on_cpu.entropy, **tolerance)
    torch.testing.assert_close(
        gradients(on_gpu.logp, hidden, weight), gradients(on_cpu.logp, hidden, weight), **tolerance
    )
    kl = full_kl(hidden.cuda(), hidden.flip(0).cuda(), weight.cuda(), forbidden=FORBIDDEN, chunk=4)
    cpu_kl = full_kl(hidden, hidden.flip(0), weight, forbidden=FORBIDDEN, chunk=4)
    torch.testing.assert_close(kl.cpu(), cpu_kl, **tolerance)
    torch.testing.assert_close(gradients(kl, hidden, weight), gradients(cpu_kl, hidden, weight), **tolerance)

    positions, vocabulary, chunk = 4096, 50_000, 256
    hidden = torch.randn(positions, 64, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, 64, device="cuda", dtype=dtype, requires_grad=True)
    targets = torch.randint(vocabulary, (positions,), device="cuda")
    for function, buffers in (
        (lambda: token_scores(hidden, weight, targets, entropy=True, chunk=chunk).logp, 2),
        (lambda: full_kl(hidden, hidden.flip(0), weight, chunk=chunk), 3),
    ):
        torch.autograd.grad(function().sum(), (hidden, weight))  # the first call fills caches of the libraries
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(function().sum(), (hidden, weight))
        in_buffers = (torch.cuda.max_memory_allocated() - before) / (chunk * vocabulary * 4)
        assert buffers - 0.5 < in_buffers < buffers + 0.75  # the gradient of the matrix takes 1/4, twice with bf16


# Each case runs in a fork of a process that has torch loaded, so that its high-water mark starts afresh, and warms up
# on a few positions, so that the code and caches of the libraries are in memory before. Big blocks come by mmap (see
# the environment below): they count while they live and are returned when freed.
MANY_WORDS, NARROW = 50_000, 16


def peak_memory(function: str, positions: int, chunk: int) -> int:
    """Peak bytes of all live tensors over forward and backward."""
    hidden = torch.randn(positions, NARROW, requires_grad=True)
    weight = torch.randn(MANY_WORDS, NARROW, requires_grad=True)
    targets = torch.randint(MANY_WORDS, (positions,))
    softcap = 30.0 if function.startswith("capped") else None
    with LiveTensors() as live:
        if function == "plain":
            logp = (hidden @ weight.T).log_softmax(-1)[torch.arange(positions), targets]
        elif function.endswith("full_kl"):
            logp = full_kl(hidden, hidden.flip(0), weight, chunk=chunk, softcap=softcap)
        else:
            logp = token_scores(hidden, weight, targets, entropy=True, chunk=chunk, softcap=softcap).logp
        logp.sum().backward()
    return live.peak


@pytest.mark.parametrize(
    ("function", "positions", "chunk", "buffers"),
    [
        ("token_scores", 512, 64, 2),
        ("capped", 512, 64, 2),
        ("capped full_kl", 256, 64, 3),
        ("token_scores", 1024, 64, 2),
        ("token_scores", 1024, 256, 2),
        ("full_kl", 256, 64, 3),
        ("full_kl", 512, 64, 3),
        ("plain", 512, 512, 3),  # all positions at once, without chunks
    ],
)
def test_memory_grows_with_the_chunk_not_with_the_positions(function, positions, chunk, buffers) -> None:
    """In float32 buffers of chunk * vocabulary; on top of them the gradient of the matrix and what a position takes."""
    peak, buffer, gradient = peak_memory(function, positions, chunk), chunk * MANY_WORDS * 4, MANY_WORDS * NARROW * 4
    assert buffers * buffer <= peak < buffers * buffer + gradient + positions * 16 * NARROW


@pytest.mark.parametrize("cut", [{"top_k": 4}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.7}], ids=str)
@options
@chunks
def test_the_mass_of_a_cut(temperature: float, forbidden: Tensor | None, chunk: int, cut: dict) -> None:
    """The plain definition, token by token in order of probability; the sampled token is never outside."""
    hidden, weight, targets = make()
    found = support_mass(
        hidden, weight, targets, temperature=temperature, forbidden=forbidden, chunk=chunk,
        **{"top_p": 1.0, "top_k": -1} | cut,
    )  # fmt: skip
    probs = plain_log_probs(hidden, weight, temperature, forbidden).exp().detach()
    outside = 0
    for row, target in enumerate(targets.tolist()):
        order = probs[row].argsort(descending=True).tolist()[: cut.get("top_k")]
        total, mass, kept = float(probs[row][order].sum()), 0.0, set()
        for token in order:
            if mass / total >= cut.get("top_p", 1.0):
                break
            kept.add(token)
            mass += float(probs[row, token])
        outside += target not in kept
        assert float(found[row].exp()) == pytest.approx(float(probs[row][sorted(kept | {target})].sum()), rel=1e-9)
    assert 0 < outside < POSITIONS and not found.requires_grad


def log_probs(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def test_the_top_tokens_are_the_originals_and_the_rest_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: with the first two apart, p is 0.5 0.3 0.2 and q 0.1 0.1 0.8, however q is spread over the rest."""
    monkeypatch.setattr(vocab, "TOP", 2)
    p, q = log_probs(0.5, 0.3, 0.15, 0.05), log_probs(0.1, 0.1, 0.7, 0.1)
    # 0.5 ln(5/3) + 0.3 ln(3/2) + 0.2 ln(2/5) and 0.1 ln(1/3) + 0.1 ln(1/2) + 0.8 ln(8/5), halved
    ours, theirs = 0.255413 + 0.121640 - 0.183258, -0.109861 - 0.069315 + 0.376003
    assert float(COMPARED["jsd_top100"](p, q)) == pytest.approx((ours + theirs) / 2, abs=1e-5)
    assert COMPARED["jsd_top100"](p, q) < COMPARED["jsd"](p, q)


def test_all_tokens_may_be_top_ones() -> None:
    p, q = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True).log_softmax(-1).unbind()
    found, whole = COMPARED["jsd_top100"](p, q), COMPARED["jsd"](p, q)
    assert torch.allclose(found, whole, atol=1e-15)
    for ours, theirs in zip(*(torch.autograd.grad(each.sum(), (p, q)) for each in (found, whole)), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-15) and ours.isfinite().all()
