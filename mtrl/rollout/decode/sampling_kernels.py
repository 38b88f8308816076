"""From logits to tokens by given uniform numbers, as Triton kernels; `tests/torch_ops.py` does the same in torch.

The logits of a row are cut into tiles. The masses of the tiles tell in which of them the uniform number falls, so that
a token takes reading the masses and one tile, not the vocabulary. Top-k and top-p are thresholds found by counting.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mtrl.rollout.decode.buffers import Mode, Rows, Rules, Tiles, power_of_two

# mypy: disable-error-code="no-untyped-def"

ROWS_PER_PROGRAM = 16  # rows of a tile's logits
CUT_COLUMNS = 4096


@triton.jit
def tile_masses_kernel(
    raw, forbidden, settings, cut, logits, top, mass,
    N: tl.constexpr, TILES: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, CUT: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """The highest logit of each tile and the tile's mass relative to it: from the product's logits, divided by the
    temperature and with forbidden tokens at -inf; or (CUT) from such logits, with those below the cut at -inf.
    """
    tile, m = tl.program_id(0), tl.program_id(1) * M + tl.arange(0, M)
    n = tile * BN + tl.arange(0, BN)
    real = (m[:, None] >= 0) & (n < N)[None, :]
    at = m[:, None].to(tl.int64) * N + n[None, :]
    x = tl.load(raw + at, mask=real, other=float("-inf")).to(tl.float32)
    if CUT:
        x = tl.where(x < tl.load(cut + m)[:, None], float("-inf"), x)  # a NaN stays
    else:
        x = x * tl.load(settings) + tl.load(forbidden + n, mask=n < N, other=float("-inf"))[None, :]
    if WRITE:
        tl.store(logits + at, x, mask=real)
    high = tl.max(x, 1)
    safe = tl.where(high == float("-inf"), 0.0, high)
    tl.store(top + m * TILES + tile, high)
    tl.store(mass + m * TILES + tile, tl.sum(tl.exp(x - safe[:, None]), 1))


@triton.jit
def _threshold(row, low, high, target, highest, N: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """The highest value with `target` tokens (COUNT) or mass at or above it: 3 bits per pass, without sorting."""
    j = 1 + tl.arange(0, 8)
    for _ in range(8):
        step = (high - low) / 8
        threshold = low + step * j
        total = tl.zeros([8, BLOCK], tl.float32)
        for start in tl.range(0, N, BLOCK, num_stages=3):
            c = start + tl.arange(0, BLOCK)
            x = tl.load(row + c, mask=c < N, other=float("-inf"))
            weight = (x > float("-inf")).to(tl.float32) if COUNT else tl.exp(x - highest)
            total += tl.where(x[None, :] >= threshold[:, None], weight[None, :], 0.0)
        k = tl.sum(((tl.sum(total, 1) >= target) & (j < 8)).to(tl.int32))
        low, high = low + step * k, low + step * (k + 1)
    return low


@triton.jit
def find_cut_kernel(
    logits, top, settings, cut,
    N: tl.constexpr, TILES: tl.constexpr, TILES_B: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
):  # fmt: skip
    """The lowest logit of a row's top k and of the nucleus in it. Ties (within 2e-6) stay in; logits that are 25 below
    the highest stay out."""
    r = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, TILES_B)
    highest = tl.max(tl.load(top + r * TILES + t, mask=t < TILES, other=float("-inf")))
    row, low = logits + r * N, highest - 25.0
    if TOP_K:
        low = _threshold(row, low, highest, tl.load(settings + 2), highest, N, BLOCK, True)
    if TOP_P:
        mass = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, N, BLOCK, num_stages=3):
            c = start + tl.arange(0, BLOCK)
            x = tl.load(row + c, mask=c < N, other=float("-inf"))
            mass += tl.where(x >= low, tl.exp(x - highest), 0.0)
        low = _threshold(row, low, highest, tl.load(settings + 1) * tl.sum(mass), highest, N, BLOCK, False)
    tl.store(cut + r, low)


@triton.jit
def _record(s, i, chosen, logp, first, limit, stops, token, count, kv, position, tokens, logps, done, lengths, new):
    """Stores a row's new token, and where its keys and values will go. NaN ends the row."""
    tl.store(token + s, chosen)
    tl.store(tokens + s * new + i, chosen)
    tl.store(logps + s * new + i, logp)
    tl.store(count + s, i + 1)
    tl.store(kv + s, s * new + i)
    tl.store(position + s, tl.load(first + s) + i)
    was = tl.load(done + s)
    broken = (logp - logp != 0).to(tl.int32)
    ended = tl.maximum(tl.load(stops + chosen), (i + 1 >= tl.load(limit + s)).to(tl.int32))
    tl.store(lengths + s, tl.load(lengths + s) + 1 - was)
    tl.store(done + s, tl.maximum(was, tl.maximum(ended, broken)))


@triton.jit
def pick_kernel(
    logits, top, mass, forbidden, settings, slot, uniforms, first, limit, stops, token, count, kv, position, tokens,
    logps, done, lengths, new,
    N: tl.constexpr, TILES: tl.constexpr, BN: tl.constexpr, TILES_B: tl.constexpr, GREEDY: tl.constexpr,
    RAW: tl.constexpr,
):  # fmt: skip
    """A token by the row's uniform number: first the tile in which the cumulative mass passes it, then the token. RAW:
    the logits are the product's, before temperature and forbidden tokens."""
    r = tl.program_id(0).to(tl.int64)
    s = tl.load(slot + r)
    i = tl.minimum(tl.load(count + s), new - 1)
    t = tl.arange(0, TILES_B)
    high = tl.load(top + r * TILES + t, mask=t < TILES, other=float("-inf"))
    highest = tl.max(high)
    m = tl.load(mass + r * TILES + t, mask=t < TILES, other=0.0) * tl.exp(high - highest)
    m = tl.where(t < TILES, m, 0.0).to(tl.float64)
    cumulated = tl.cumsum(m, 0)
    total = tl.sum(m, 0)  # a maximum would hide a NaN
    reach = tl.load(uniforms + s * new + i) * total * (1 - 1e-12)
    c = tl.arange(0, BN)
    if GREEDY:  # noqa: SIM108
        tile = tl.argmax(high, 0)
    else:
        tile = tl.minimum(tl.sum((cumulated <= reach).to(tl.int32)), TILES - 1)
    n = tile * BN + c
    x = tl.load(logits + r * N + n, mask=n < N, other=float("-inf")).to(tl.float32)
    if RAW:
        x = x * tl.load(settings) + tl.load(forbidden + n, mask=n < N, other=float("-inf"))
    if GREEDY:
        k = tl.argmax(x, 0)
    else:
        p = tl.exp(x - highest).to(tl.float64)
        before = tl.max(tl.where(t < tile, cumulated, 0.0))
        k = tl.sum((before + tl.cumsum(p, 0) <= reach).to(tl.int32))
        k = tl.maximum(tl.minimum(k, tl.max(tl.where(p > 0, c, -1))), 0)
    chosen = tl.minimum(tile * BN + k, N - 1)
    logp = tl.sum(tl.where(c == k, x, 0.0)) - highest - tl.log(total.to(tl.float32))
    _record(s, i, chosen, logp, first, limit, stops, token, count, kv, position, tokens, logps, done, lengths, new)


# ------------------------------------------------------------------------------------------------------------ launching
def tile_masses(raw: Tensor, rules: Rules, logits: Tensor | None, tiles: Tiles) -> None:
    """From the product's logits; stores in `logits` those that are sampled from, if a cut needs all of them."""
    _masses(raw, rules, raw, raw if logits is None else logits, tiles, cut=False, write=logits is not None)


def cut_masses(logits: Tensor, cut: Tensor, rules: Rules, tiles: Tiles) -> None:
    """Sets logits below the cut [rows] to -inf, in place, and computes the masses again."""
    _masses(logits, rules, cut, logits, tiles, cut=True, write=True)


def _masses(
    raw: Tensor, rules: Rules, floor: Tensor, logits: Tensor, tiles: Tiles, *, cut: bool, write: bool
) -> None:  # fmt: skip
    rows, vocabulary = raw.shape
    tile_masses_kernel[(tiles.count, rows // ROWS_PER_PROGRAM)](
        raw, rules.forbidden, rules.settings, floor, logits, tiles.top, tiles.mass, N=vocabulary, TILES=tiles.count,
        M=ROWS_PER_PROGRAM, BN=tiles.width, CUT=cut, WRITE=write,
    )  # fmt: skip


def find_cut(logits: Tensor, rules: Rules, mode: Mode, tiles: Tiles, cut: Tensor) -> None:
    rows, vocabulary = logits.shape
    find_cut_kernel[(rows,)](
        logits, tiles.top, rules.settings, cut, N=vocabulary, TILES=tiles.count, TILES_B=power_of_two(tiles.count),
        BLOCK=min(CUT_COLUMNS, power_of_two(vocabulary)), TOP_K=mode.top_k, TOP_P=mode.top_p, num_warps=16,
    )  # fmt: skip


def pick(
    logits: Tensor, tiles: Tiles, rules: Rules, mode: Mode, slot: Tensor, rows: Rows, *, raw: bool
) -> None:  # fmt: skip
    """`raw`: the logits are the product's, before temperature and forbidden tokens."""
    pick_kernel[(len(slot),)](
        logits, tiles.top, tiles.mass, rules.forbidden, rules.settings, slot, rows.uniforms, rows.first, rows.limit,
        rules.stops, rows.token, rows.count, rows.kv_index, rows.position, rows.tokens, rows.logps, rows.done,
        rows.lengths, rows.new, N=logits.shape[1], TILES=tiles.count, BN=tiles.width, TILES_B=power_of_two(tiles.count),
        GREEDY=mode.greedy, RAW=raw,
    )  # fmt: skip
