"""Log-probs, entropy and KL over the whole vocabulary, from hidden states and the output matrix, in chunks.

The logits of a chunk of positions exist only while that chunk is processed; the backward pass recomputes them. Memory
grows with the chunk, never with positions * vocabulary: at its peak `token_scores` holds two and `full_kl` three
float32 buffers of chunk * vocabulary, forward or backward. The gradient of the output matrix has its size (and a
temporary copy if the matrix is in half precision). `fuse` may compile what `token_scores` does with a chunk: its logits
are then read a few times in the dtype of the products, instead of being copied in float32 at every operation.

Everything is computed on logits / temperature in float32 (float64 stays), with forbidden ids (image and video marks) at
-inf; `softcap` bounds logits before (`cap_logits`). Products are in the dtype of the hidden states; autocast is
disabled, or the two passes would not match.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

CHUNK_POSITIONS = 512
TOP = 100  # the most likely tokens of the original, which `jsd_top100` tells apart
FORBIDDEN = -1e30  # a log-prob whose differences are 0, not NaN as those of -inf
Fuse = Callable[[Callable[..., Any]], Callable[..., Any]]  # returns the function, or the same compiled


class LogitRules(NamedTuple):
    """What makes logits of the products of hidden states and the output matrix."""

    temperature: float
    forbidden: Tensor | None  # token ids, on the device of the hidden states
    softcap: float | None


class TokenScores(NamedTuple):
    logp: Tensor  # [M], with gradients
    entropy: Tensor | None  # [M], without
    support: Tensor | None = None  # [M], without: log-probability of the sampler's top-p/top-k support


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    forbidden: Tensor | None = None,
    softcap: float | None = None,
    entropy: bool = False,
    chunk: int = CHUNK_POSITIONS,
    fuse: Fuse = lambda function: function,
) -> TokenScores:
    """Log-prob of targets [M] from hidden [M, H] and the output matrix weight [V, H]; entropy on request.

    `forbidden` [F] are token ids, on any device.
    """
    rules = _rules(hidden, temperature, forbidden, softcap)
    logp, entropies = _TokenScores.apply(hidden, weight.to(hidden.dtype), targets, rules, entropy, chunk, fuse)
    return TokenScores(logp, entropies if entropy else None)


def full_kl(
    hidden: Tensor,
    other_hidden: Tensor,
    weight: Tensor,
    other_weight: Tensor | None = None,
    *,
    temperature: float = 1.0,
    forbidden: Tensor | None = None,
    softcap: float | None = None,
    chunk: int = CHUNK_POSITIONS,
) -> Tensor:
    """KL(p || q) [M] over the vocabulary: p from `hidden`, q from `other_hidden` (with its own matrix, if given).

    Gradients flow through p, to `hidden` and `weight`; q is a constant.
    """
    other_weight = (weight if other_weight is None else other_weight).detach().to(other_hidden.dtype)
    rules = _rules(hidden, temperature, forbidden, softcap)
    kl: Tensor = _FullKL.apply(hidden, weight.to(hidden.dtype), other_hidden.detach(), other_weight, rules, chunk)
    return kl


def compare_distributions(
    hidden: Tensor,
    other_hidden: Tensor,
    weight: Tensor,
    quantities: Sequence[str],
    *,
    temperature: float = 1.0,
    forbidden: Tensor | None = None,
    softcap: float | None = None,
    chunk: int = CHUNK_POSITIONS,
) -> dict[str, Tensor]:
    """[M] each by name, of COMPARED: how far q (from `other_hidden`) is from p over the vocabulary, and its entropy. It
    holds up to five float32 buffers of chunk * vocabulary. With gradients, through both, a chunk is computed again in
    the backward pass, and holds twice as much."""
    rules, weight = _rules(hidden, temperature, forbidden, softcap), weight.to(hidden.dtype)

    def compare(hidden: Tensor, other_hidden: Tensor, weight: Tensor) -> list[Tensor]:
        pair = [_finite_log_probs(each, weight, rules) for each in (hidden, other_hidden)]
        return [COMPARED[name](*pair).clamp(min=0.0) for name in quantities]  # rounding may leave less

    measure = partial(checkpoint, compare, use_reentrant=False) if torch.is_grad_enabled() else compare
    chunks = _chunks(len(hidden), chunk) or [slice(0, 0)]  # a rank may have no token
    parts = [measure(hidden[rows], other_hidden[rows], weight) for rows in chunks]
    return {name: torch.cat(values) for name, values in zip(quantities, zip(*parts, strict=True), strict=True)}


def _finite_log_probs(hidden: Tensor, weight: Tensor, rules: LogitRules) -> Tensor:
    """A forbidden token is far below all others on both sides, and adds nothing to values and gradients."""
    log_probs = _logits(hidden, weight, rules).log_softmax(-1)
    return log_probs if rules.forbidden is None else log_probs.clamp(min=FORBIDDEN)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    p, gap = log_p.exp(), log_p - log_q
    return (p * gap if p.requires_grad else p.mul_(gap)).sum(-1)


def _jsd(log_p: Tensor, log_q: Tensor) -> Tensor:
    middle = torch.logaddexp(log_p, log_q).sub_(math.log(2))
    return (_kl(log_p, middle) + _kl(log_q, middle)) / 2


def _top_jsd(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Of the top tokens of p, with all others as one: never more than that of all tokens."""
    top = log_p.topk(min(TOP, log_p.shape[-1])).indices
    pair = ((each, each.scatter(-1, top, FORBIDDEN).logsumexp(-1, keepdim=True)) for each in (log_p, log_q))
    return _jsd(*(torch.cat([each.gather(-1, top), rest], -1) for each, rest in pair))


def _entropy(log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_p).sum(-1)


# Functions of two log-probs [C, V], in nats: KL(p || q), KL(q || p), the Jensen-Shannon divergence, of all tokens and
# of the top ones, the entropy of q.
COMPARED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": _kl,
    "reverse_kl": lambda log_p, log_q: _kl(log_q, log_p),
    "jsd": _jsd,
    "jsd_top100": _top_jsd,
    "entropy": lambda _, log_q: _entropy(log_q),
}


def top_p_top_k(logits: Tensor, top_p: float, top_k: int) -> Tensor:
    """Logits with everything outside the top k and the nucleus at -inf."""
    if 0 < top_k < logits.shape[-1]:
        weakest = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < weakest, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        # A token stays while those before it sum to less than top_p; the first always stays.
        outside = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(outside, -torch.inf)
    return logits


@torch.no_grad()
def support_mass(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    top_p: float,
    top_k: int,
    temperature: float = 1.0,
    forbidden: Tensor | None = None,
    softcap: float | None = None,
    chunk: int = CHUNK_POSITIONS,
) -> Tensor:
    """[M]: log-probability of the support that top-p and top-k leave. A log-prob minus this is that of the renormalised
    distribution. The target always belongs to the support: it was sampled, even if rounding puts it just outside."""
    rules, weight = _rules(hidden, temperature, forbidden, softcap), weight.to(hidden.dtype)
    mass = hidden.new_empty(len(hidden), dtype=_wide(hidden))
    for rows in _chunks(len(hidden), chunk):
        log_probs = _logits(hidden[rows], weight, rules).log_softmax(-1)
        left = top_p_top_k(log_probs, top_p, top_k).isfinite().scatter_(1, targets[rows, None], True)
        mass[rows] = log_probs.masked_fill_(~left, -torch.inf).logsumexp(-1)
    return mass


@torch.no_grad()
def map_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    function: Callable[[Tensor, Tensor], Tensor],
    *,
    temperature: float = 1.0,
    forbidden: Tensor | None = None,
    softcap: float | None = None,
    chunk: int = CHUNK_POSITIONS,
) -> Tensor:
    """[M, ..]: the results [C, ..] of a function for the log-probs [C, V] and the targets [C] of each chunk."""
    rules, weight = _rules(hidden, temperature, forbidden, softcap), weight.to(hidden.dtype)
    parts = [
        function(_logits(hidden[rows], weight, rules).log_softmax(-1), targets[rows])
        for rows in _chunks(len(hidden), chunk) or [slice(0, 0)]  # a rank may have no token
    ]
    return torch.cat(parts)


class _TokenScores(torch.autograd.Function):
    """d logp_target / d logit_j = [j is the target] - p_j"""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        rules: LogitRules,
        entropy: bool,
        chunk: int,
        fuse: Fuse,
    ) -> tuple[Tensor, Tensor]:
        logp = hidden.new_empty(len(hidden), dtype=_wide(hidden))
        entropies = logp.new_empty(len(hidden) if entropy else 0)
        score = fuse(_score_chunk)
        for rows in _chunks(len(hidden), chunk):
            logp[rows], found = score(hidden[rows], weight, targets[rows], rules, entropy)
            if found is not None:
                entropies[rows] = found
        ctx.save_for_backward(hidden, weight, targets)
        ctx.rules, ctx.chunk, ctx.fuse = rules, chunk, fuse
        ctx.mark_non_differentiable(entropies)
        return logp, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets = ctx.saved_tensors
        differentiate = ctx.fuse(_logit_gradients)

        def grad_logits(rows: slice) -> Tensor:
            scale = grad_logp[rows, None] / ctx.rules.temperature
            grad: Tensor = differentiate(hidden[rows], weight, targets[rows], scale, ctx.rules)
            return grad

        return *_pull_back(ctx, hidden, weight, grad_logits), *(None,) * 5


def _score_chunk(
    hidden: Tensor, weight: Tensor, targets: Tensor, rules: LogitRules, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    log_probs = _logits(hidden, weight, rules).log_softmax(-1)
    logp = log_probs.gather(-1, targets[:, None])[:, 0]
    if not entropy:
        return logp, None
    torch.special.entr(log_probs.exp_(), out=log_probs)  # -p log p, and 0 where p is 0
    return logp, log_probs.sum(-1)


def _logit_gradients(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, rules: LogitRules) -> Tensor:
    """`scale` [C, 1] times ([j is the target] - p_j), in the dtype of the products."""
    logits = _logits(hidden, weight, rules)
    probs = logits.softmax(-1)
    slope = None if rules.softcap is None else _cap_slope(logits, rules)
    del logits  # frees memory
    if torch.compiler.is_compiling():  # the same numbers, without a scatter
        is_target = torch.arange(len(weight), device=weight.device) == targets[:, None]
        grad = torch.where(is_target, scale - scale * probs, -scale * probs)
    else:
        grad = probs.mul_(-scale).scatter_add_(1, targets[:, None], scale)
    if slope is not None:
        grad *= slope
    if rules.forbidden is not None:  # a forbidden target is constant
        grad = _fill_columns(grad, rules.forbidden, 0.0)
    return grad.to(hidden.dtype)


class _FullKL(torch.autograd.Function):
    """d KL / d logit_j = p_j (log p_j - log q_j - KL)"""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        other_hidden: Tensor,
        other_weight: Tensor,
        rules: LogitRules,
        chunk: int,
    ) -> Tensor:
        kl = hidden.new_empty(len(hidden), dtype=_wide(hidden))
        for rows in _chunks(len(hidden), chunk):
            p, q = (hidden[rows], weight), (other_hidden[rows], other_weight)
            probs, gap = _probs_and_gap(p, q, rules)
            kl[rows] = probs.mul_(gap).sum(-1)
            del probs, gap  # before the next chunk is allocated
        ctx.save_for_backward(hidden, weight, other_hidden, other_weight, kl)
        ctx.rules, ctx.chunk = rules, chunk
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, other_hidden, other_weight, kl = ctx.saved_tensors

        def grad_logits(rows: slice) -> Tensor:
            p, q = (hidden[rows], weight), (other_hidden[rows], other_weight)
            probs, gap = _probs_and_gap(p, q, ctx.rules)
            gap.sub_(kl[rows, None]).mul_(probs).mul_(grad_kl[rows, None] / ctx.rules.temperature)
            del probs  # before the logits are computed again
            if ctx.rules.softcap is not None:  # forbidden ones have no gradient already
                gap *= _cap_slope(_logits(*p, ctx.rules._replace(forbidden=None)), ctx.rules)
            return gap.to(hidden.dtype)

        return *_pull_back(ctx, hidden, weight, grad_logits), *(None,) * 4


def _probs_and_gap(p: tuple[Tensor, Tensor], q: tuple[Tensor, Tensor], rules: LogitRules) -> tuple[Tensor, Tensor]:
    """p and log p - log q of a chunk, each side given as (hidden, weight)."""
    log_p = _logits(*p, rules).log_softmax(-1)
    log_q = _logits(*q, rules).log_softmax(-1)
    gap = log_q.neg_().add_(log_p)
    if rules.forbidden is not None:  # -inf on both sides: no contribution
        gap.index_fill_(1, rules.forbidden, 0.0)
    return log_p.exp_(), gap


def _pull_back(
    ctx: Any, hidden: Tensor, weight: Tensor, grad_logits: Callable[[slice], Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of hidden and weight from those of hidden @ weight.T, computed chunk by chunk."""
    needs_hidden, needs_weight = ctx.needs_input_grad[:2]
    grad_hidden = torch.empty_like(hidden) if needs_hidden else None
    # float32 whatever the dtype of the weights, since it is a sum over many chunks
    grad_weight = torch.zeros_like(weight, dtype=_wide(weight)) if needs_weight else None
    with _no_autocast(hidden):
        for rows in _chunks(len(hidden), ctx.chunk):
            grad = grad_logits(rows)
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ weight
            if grad_weight is not None and grad_weight.dtype == grad.dtype:
                grad_weight.addmm_(grad.T, hidden[rows])  # in place, no temporary
            elif grad_weight is not None:
                grad_weight += grad.T @ hidden[rows]
            del grad  # before the next chunk is allocated
    return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)


def cap_logits(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits bounded by +-softcap, as Gemma's are: softcap * tanh(logits / softcap). What is given is overwritten."""
    return logits if softcap is None else logits.div_(softcap).tanh_() * softcap


def _cap_slope(logits: Tensor, rules: LogitRules) -> Tensor:
    """The derivative of `cap_logits`, 1 - tanh^2, from `_logits`, which are overwritten."""
    assert rules.softcap is not None
    return logits.mul_(rules.temperature / rules.softcap).square_().neg_().add_(1.0)


def _logits(hidden: Tensor, weight: Tensor, rules: LogitRules) -> Tensor:
    with _no_autocast(hidden):
        logits = (hidden @ weight.T).to(_wide(hidden))
    logits = cap_logits(logits, rules.softcap)
    if rules.temperature != 1:
        logits.div_(rules.temperature)
    return logits if rules.forbidden is None else _fill_columns(logits, rules.forbidden, -torch.inf)


def _fill_columns(values: Tensor, columns: Tensor, number: float) -> Tensor:
    """In place, unless it is compiled: a scatter could not be fused with other operations."""
    if torch.compiler.is_compiling():
        chosen = torch.zeros(values.shape[1], dtype=torch.bool, device=values.device).index_fill(0, columns, True)
        return values.masked_fill(chosen, number)
    return values.index_fill_(1, columns, number)


def _no_autocast(like: Tensor) -> torch.autocast:
    return torch.autocast(like.device.type, enabled=False)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _rules(hidden: Tensor, temperature: float, forbidden: Tensor | None, softcap: float | None) -> LogitRules:
    return LogitRules(temperature, None if forbidden is None else forbidden.to(hidden.device), softcap)


def _chunks(length: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]
