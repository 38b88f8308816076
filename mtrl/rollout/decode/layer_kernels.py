"""Everything of a decoder layer but its matrix products, as Triton kernels; `tests/torch_ops.py` has them in torch.

A layer is seven launches of these and four products of cuBLAS. Numbers are rounded to the dtype of the weights where
transformers rounds them, so that log-probs differ from the trainer's only as much as products do.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mtrl.rollout.decode.buffers import AttentionPieces, KeysAndValues, Rows, SlotTable, power_of_two
from mtrl.rollout.decode.fused_weights import AttentionWeights
from mtrl.rollout.decode.layers import Attention, Norm

# mypy: disable-error-code="no-untyped-def"

LOG2E = 1.4426950408889634
GATE_COLUMNS = 1024
WIDE_HEAD = 128  # keys and values of wider heads leave no room in shared memory for a third stage


# -------------------------------------------------------------------------------------------------- embedding and norms
@triton.jit
def _weighted(x, weight, dtype: tl.constexpr, ONE_PLUS: tl.constexpr):
    """Normed x times the norm's weight, in float32; both [.., width] or broadcast to it."""
    if ONE_PLUS:
        return (x * (1.0 + weight.to(tl.float32))).to(dtype)
    else:
        return (x.to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


@triton.jit
def _rms(x, weight, eps, H: tl.constexpr, dtype: tl.constexpr, ONE_PLUS: tl.constexpr):
    scale = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    return _weighted(x * scale, weight, dtype, ONE_PLUS)


@triton.jit
def embed_norm_kernel(
    slot, token, table, weight, residual, out, eps, factor,
    H: tl.constexpr, HB: tl.constexpr, SCALED: tl.constexpr, ONE_PLUS: tl.constexpr,
):  # fmt: skip
    """The start of a step: embeds and norms a row's last token."""
    r = tl.program_id(0)
    h = tl.arange(0, HB)
    real = h < H
    last = tl.load(token + tl.load(slot + r)).to(tl.int64)
    x = tl.load(table + last * H + h, mask=real, other=0.0)
    if SCALED:
        x = (x.to(tl.float32) * factor).to(x.dtype)
    w = tl.load(weight + h, mask=real, other=0.0)
    tl.store(residual + r * H + h, x, mask=real)
    tl.store(out + r * H + h, _rms(x.to(tl.float32), w, eps, H, x.dtype, ONE_PLUS), mask=real)


@triton.jit
def add_norm_kernel(
    update, residual, weight, out, after, eps,
    H: tl.constexpr, HB: tl.constexpr, AFTER: tl.constexpr, ONE_PLUS: tl.constexpr,
):  # fmt: skip
    """residual += update, or its norm (AFTER); out = the RMS norm of the residual."""
    r = tl.program_id(0)
    h = tl.arange(0, HB)
    real = h < H
    w = tl.load(weight + h, mask=real, other=0.0)
    x = tl.load(residual + r * H + h, mask=real, other=0.0)
    y = tl.load(update + r * H + h, mask=real, other=0.0)
    if AFTER:
        y = _rms(y.to(tl.float32), tl.load(after + h, mask=real, other=0.0), eps, H, y.dtype, ONE_PLUS)
    x = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
    tl.store(residual + r * H + h, x, mask=real)
    tl.store(out + r * H + h, _rms(x.to(tl.float32), w, eps, H, x.dtype, ONE_PLUS), mask=real)


@triton.jit
def gate_mul_kernel(x, out, N: tl.constexpr, BN: tl.constexpr, GELU: tl.constexpr):
    """activation(gate) * up of x [rows, 2 N]: gate, then up. Gelu by its tanh is gate * sigmoid(a polynomial)."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    real = c < N
    gate = tl.load(x + r * 2 * N + c, mask=real, other=0.0).to(tl.float32)
    up = tl.load(x + r * 2 * N + N + c, mask=real, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    inner = gate
    if GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    y = (gate / (1 + tl.exp(-inner))).to(dtype).to(tl.float32) * up
    tl.store(out + r * N + c, y.to(dtype), mask=real)


# ------------------------------------------------------------------------------------ queries, keys and values of a row
@triton.jit
def _projected(qkv, bias, row, column, real, dtype: tl.constexpr, BIAS: tl.constexpr):
    x = tl.load(qkv + row + column, mask=real, other=0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias + column, mask=real, other=0.0).to(tl.float32)
    return x.to(dtype).to(tl.float32)


@triton.jit
def _rotated(
    x1, x2, weight, cos, sin, c1, c2, real, eps,
    D: tl.constexpr, NORM: tl.constexpr, ONE_PLUS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Both halves [heads, D / 2] of some heads, normed if the layer norms them, and rotated."""
    if NORM:
        scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
        w1 = tl.load(weight + c1, mask=real, other=0.0)
        w2 = tl.load(weight + c2, mask=real, other=0.0)
        x1 = _weighted(x1 * scale, w1, dtype, ONE_PLUS).to(tl.float32)
        x2 = _weighted(x2 * scale, w2, dtype, ONE_PLUS).to(tl.float32)
    return (x1 * cos - x2 * sin).to(dtype), (x2 * cos + x1 * sin).to(dtype)


@triton.jit
def rotate_write_kernel(
    qkv, bias, q_norm, k_norm, cos, sin, slot, kv_index, position, query, keys, values, eps,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, SHARE: tl.constexpr, SHARE_B: tl.constexpr,
    HALF_B: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, QD: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, ONE_PLUS: tl.constexpr,
):  # fmt: skip
    """One row and one key head: bias, norm and rotary positions; keys and values go into the cache at the kv_index. The
    numbers of a head are read as pairs, which are rotated, or by no angle where they are not among the first ROTARY. A
    pair has a number of each half of these, or (INTERLEAVED) two neighbours."""
    r, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype = query.dtype.element_ty
    HALF: tl.constexpr = D // 2
    c = tl.arange(0, HALF_B)
    real = c < HALF
    s = tl.load(slot + r)
    angle = tl.load(position + s) * (ROTARY // 2)
    turned, c1, c2 = real, c, c + HALF
    if ROTARY < D:
        turned = c < ROTARY // 2
        c1 = tl.where(turned, c, c + ROTARY // 2)
        c2 = tl.where(turned, c + ROTARY // 2, c + HALF)
    if INTERLEAVED:
        c1 = tl.where(turned, 2 * c, c1)
        c2 = tl.where(turned, 2 * c + 1, c2)
    co = tl.load(cos + angle + c, mask=turned, other=1.0).to(tl.float32)[None, :]
    si = tl.load(sin + angle + c, mask=turned, other=0.0).to(tl.float32)[None, :]
    row = r * (HQ * QD + 2 * HKV * D)
    j, one = tl.arange(0, SHARE_B)[:, None], tl.arange(0, 1)[:, None]
    here, alone = (j < SHARE) & real[None, :], (one < 1) & real[None, :]
    c1, c2 = c1[None, :], c2[None, :]
    q_at = (h * SHARE + j) * QD
    k_at = HQ * QD + (h + one) * D
    v_at = HQ * QD + (HKV + h + one) * D
    q1 = _projected(qkv, bias, row, q_at + c1, here, dtype, BIAS)
    q2 = _projected(qkv, bias, row, q_at + c2, here, dtype, BIAS)
    k1 = _projected(qkv, bias, row, k_at + c1, alone, dtype, BIAS)
    k2 = _projected(qkv, bias, row, k_at + c2, alone, dtype, BIAS)
    v1 = _projected(qkv, bias, row, v_at + c1, alone, dtype, BIAS)
    v2 = _projected(qkv, bias, row, v_at + c2, alone, dtype, BIAS)
    q1, q2 = _rotated(q1, q2, q_norm, co, si, c1, c2, real[None, :], eps, D, NORM, ONE_PLUS, dtype)
    k1, k2 = _rotated(k1, k2, k_norm, co, si, c1, c2, real[None, :], eps, D, NORM, ONE_PLUS, dtype)
    to = query + (r * HQ + h * SHARE + j) * D
    tl.store(to + c1, q1, mask=here)
    tl.store(to + c2, q2, mask=here)
    cell = (tl.load(kv_index + s).to(tl.int64) * HKV + h) * D + one
    tl.store(keys + cell + c1, k1, mask=alone)
    tl.store(keys + cell + c2, k2, mask=alone)
    tl.store(values + cell + c1, v1.to(dtype), mask=alone)
    tl.store(values + cell + c2, v2.to(dtype), mask=alone)


# ------------------------------------------------------------------------------------------------------------ attention
@triton.jit
def _attend_to(
    query, at, live, keys, values, low, high, first, scale, part, lse, to,
    STRIDE: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """M queries over the keys low .. high - 1: their output and its log2-sum-exp2; only -inf if there are none. EACH:
    a query sees keys from its `first` on, and maybe none."""
    if low < high:
        d, n = tl.arange(0, D), tl.arange(0, BLOCK)
        q = tl.load(query + at[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
        top = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        out = tl.zeros([M, D], tl.float32)
        for start in range(low, high, BLOCK):
            here = (start + n) < high
            cell = (start + n)[:, None] * STRIDE + d[None, :]
            k = tl.load(keys + cell, mask=here[:, None], other=0.0)
            score = tl.dot(q, k.T, input_precision="ieee") * scale
            score = tl.where(here[None, :], score, float("-inf"))
            if EACH:
                score = tl.where((start + n)[None, :] >= first[:, None], score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            finite = higher
            if EACH:  # -inf - -inf is NaN
                finite = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2(score - finite[:, None])
            shrink = tl.exp2(top - finite)
            v = tl.load(values + cell, mask=here[:, None], other=0.0)
            out = tl.dot(p.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
            total = total * shrink + tl.sum(p, 1)
            top = higher
        if EACH:
            total = tl.where(top == float("-inf"), 1.0, total)
        tl.store(part + to[:, None] * D + d[None, :], out / total[:, None], mask=live[:, None])
        tl.store(lse + to, top + tl.log2(total), mask=live)
    else:
        tl.store(lse + to, tl.full([M], float("-inf"), tl.float32), mask=live)


@triton.jit
def _attend_prompt(
    program, query, keys, values, members, start, length, slot, count, part, lse, scale, rows,
    MEMBERS: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, SHARE: tl.constexpr, M: tl.constexpr,
    PIECES: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """A piece of a prompt, read once for all rows of a group; its size depends on the prompt's length alone, and where
    a window begins changes which of its blocks are read, not where they begin."""
    piece, h, g = program % PIECES, (program // PIECES) % HKV, program // (PIECES * HKV)
    m = tl.arange(0, M)
    row = tl.load(members + g * MEMBERS + m // SHARE, mask=m < MEMBERS * SHARE, other=-1)
    n = tl.where(tl.max(row, 0) < 0, 0, tl.load(length + g))
    size = tl.maximum(LEAST, tl.cdiv(tl.cdiv(n, MOST), 16) * 16)
    low = tl.minimum(piece * size, n)
    high = tl.minimum(low + size, n)
    first = tl.zeros([M], tl.int32)
    if WINDOW:
        written = tl.load(count + tl.load(slot + row, mask=row >= 0, other=0), mask=row >= 0, other=0)
        first = tl.where(row >= 0, n + written - WINDOW, high)
        low = tl.minimum(low + tl.maximum(tl.min(first, 0) - low, 0) // BLOCK * BLOCK, high)
    at = row * HQ + h * SHARE + m % SHARE
    base = (tl.load(start + g).to(tl.int64) * HKV + h) * D
    _attend_to(query, at, row >= 0, keys + base, values + base, low, high, first, scale, part, lse,
               piece * rows * HQ + at, HKV * D, D, M, BLOCK, WINDOW > 0)  # fmt: skip


@triton.jit
def _attend_own(
    program, query, keys, values, slot, count, part, lse, scale, rows, new,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, SHARE: tl.constexpr, M: tl.constexpr, BEFORE: tl.constexpr,
    PIECES: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """A chunk of one row's response tokens, or what a window shows of it."""
    piece, h, r = program % PIECES, (program // PIECES) % HKV, program // (PIECES * HKV)
    m = tl.arange(0, M)
    s = tl.load(slot + r)
    n = tl.load(count + s)
    low = tl.minimum(piece * CHUNK, n)
    high = tl.minimum(low + CHUNK, n)
    if WINDOW:
        low = tl.minimum(tl.maximum(low, n - WINDOW), high)
    at = r * HQ + h * SHARE + m
    base = (s.to(tl.int64) * new * HKV + h) * D
    _attend_to(query, at, m < SHARE, keys + base, values + base, low, high, m, scale, part, lse,
               (BEFORE + piece) * rows * HQ + at, HKV * D, D, M, BLOCK, False)  # fmt: skip


@triton.jit
def attend_kernel(
    query, prefix_k, prefix_v, own_k, own_v, members, start, length, slot, count, part, lse, scale, groups, rows, new,
    MEMBERS: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, SHARE: tl.constexpr,
    M: tl.constexpr, M_OWN: tl.constexpr, PIECES: tl.constexpr, OWN_PIECES: tl.constexpr, LEAST: tl.constexpr,
    MOST: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Attention in pieces, each with its log2-sum-exp2: first the programs of the prompts, then those of responses."""
    program = tl.program_id(0)
    shared = groups * HKV * PIECES
    if program < shared:
        _attend_prompt(program, query, prefix_k, prefix_v, members, start, length, slot, count, part, lse, scale, rows,
                       MEMBERS, HQ, HKV, D, SHARE, M, PIECES, LEAST, MOST, BLOCK, WINDOW)  # fmt: skip
    else:
        _attend_own(program - shared, query, own_k, own_v, slot, count, part, lse, scale, rows, new, HQ, HKV, D, SHARE,
                    M_OWN, PIECES, OWN_PIECES, CHUNK, BLOCK, WINDOW)  # fmt: skip


@triton.jit
def combine_kernel(
    part, lse, slot, qkv, out, unused_slot, rows,
    HQ: tl.constexpr, D: tl.constexpr, PIECES: tl.constexpr, PIECES_B: tl.constexpr, STRIDE: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Adds the pieces of attention of one row and head in order, weighted by their mass: pieces without keys, of which
    a larger room has more, change no bit. A row without a response becomes zeros. GATED: times the sigmoid of the
    numbers after the head's queries."""
    r, h = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, PIECES_B)
    d = tl.arange(0, D)
    pieces = tl.where(tl.load(slot + r) == unused_slot, 0, PIECES)
    mass = tl.load(lse + (i * rows + r) * HQ + h, mask=i < pieces, other=float("-inf"))
    top = tl.max(mass)
    weights = tl.exp2(mass - tl.where(top == float("-inf"), 0.0, top))
    y, total = tl.zeros([D], tl.float32), 0.0
    for p in tl.static_range(PIECES):
        weight = tl.sum(tl.where(i == p, weights, 0.0))
        y += weight * tl.load(part + ((p * rows + r) * HQ + h) * D + d, mask=d < tl.where(weight > 0, D, 0), other=0.0)
        total += weight
    y = (y / tl.maximum(total, 1e-30)).to(out.dtype.element_ty)
    if GATED:
        gate = tl.load(qkv + r * STRIDE + (2 * h + 1) * D + d).to(tl.float32)
        gate = (1 / (1 + tl.exp(-gate))).to(y.dtype).to(tl.float32)
        y = (y.to(tl.float32) * gate).to(y.dtype)
    tl.store(out + (r * HQ + h) * D + d, y)


# ------------------------------------------------------------------------------------------------------------ launching
def embed_norm(
    slot: Tensor, token: Tensor, table: Tensor, weight: Tensor, residual: Tensor, out: Tensor, norm: Norm,
    scale: float | None = None,
) -> None:  # fmt: skip
    """`scale`: the factor of embeddings, if there is one."""
    width = table.shape[1]
    embed_norm_kernel[(len(slot),)](
        slot, token, table, weight, residual, out, norm.eps, scale or 1.0, H=width, HB=power_of_two(width),
        SCALED=scale is not None, ONE_PLUS=norm.one_plus,
    )  # fmt: skip


def add_norm(
    update: Tensor, residual: Tensor, weight: Tensor, out: Tensor, norm: Norm, after: Tensor | None = None
) -> None:  # fmt: skip
    """`after`: the weight of the norm of the update, if there is one."""
    rows, width = residual.shape
    add_norm_kernel[(rows,)](
        update, residual, weight, out, weight if after is None else after, norm.eps, H=width, HB=power_of_two(width),
        AFTER=after is not None, ONE_PLUS=norm.one_plus,
    )  # fmt: skip


def gate_mul(both: Tensor, out: Tensor, activation: str) -> None:
    rows, width = out.shape
    gate_mul_kernel[(rows, -(-width // GATE_COLUMNS))](
        both, out, N=width, BN=GATE_COLUMNS, GELU=activation == "gelu_tanh"
    )  # fmt: skip


def rotate_write(
    qkv: Tensor, weights: AttentionWeights, kind: Attention, norm: Norm, angles: tuple[Tensor, Tensor], slot: Tensor,
    rows: Rows, query: Tensor, keys: Tensor, values: Tensor,
) -> None:  # fmt: skip
    optional = (weights.bias, weights.query_norm, weights.key_norm)
    bias, query_norm, key_norm = (qkv if weight is None else weight for weight in optional)  # kernels take no None
    rotate_write_kernel[(len(slot), kind.key_heads)](
        qkv, bias, query_norm, key_norm, *angles, slot, rows.kv_index, rows.position, query, keys, values, norm.eps,
        HQ=kind.heads, HKV=kind.key_heads, D=kind.head_dim, SHARE=kind.share, SHARE_B=power_of_two(kind.share),
        HALF_B=power_of_two(kind.head_dim // 2), ROTARY=kind.rotary, INTERLEAVED=kind.interleaved, QD=kind.query_dim,
        BIAS=weights.bias is not None, NORM=weights.query_norm is not None, ONE_PLUS=norm.one_plus,
    )  # fmt: skip


def attend(
    query: Tensor, qkv: Tensor, kind: Attention, cache: KeysAndValues, table: SlotTable, rows: Rows,
    pieces: AttentionPieces, out: Tensor,
) -> None:  # fmt: skip
    """`qkv` has the gates of the output, if it has gates."""
    count, (groups, members) = len(table.slot), table.members.shape
    own_pieces = len(pieces.part) - pieces.of_prompt
    programs = groups * kind.key_heads * pieces.of_prompt + count * kind.key_heads * own_pieces
    attend_kernel[(programs,)](
        query, *cache.prompts, *cache.own, table.members, table.start, table.length, table.slot, rows.count,
        pieces.part, pieces.lse, kind.scale * LOG2E, groups, count, rows.new, MEMBERS=members, HQ=kind.heads,
        HKV=kind.key_heads, D=kind.head_dim, SHARE=kind.share, M=power_of_two(members * kind.share, 16),
        M_OWN=power_of_two(kind.share, 16), PIECES=pieces.of_prompt, OWN_PIECES=own_pieces, LEAST=pieces.least,
        MOST=pieces.most, CHUNK=pieces.chunk, BLOCK=pieces.block, WINDOW=kind.window or 0,
        num_stages=3 if kind.head_dim <= WIDE_HEAD else 2,
    )  # fmt: skip
    combine_kernel[(count, kind.heads)](
        pieces.part, pieces.lse, table.slot, qkv, out, table.unused_slot, count, HQ=kind.heads, D=kind.head_dim,
        PIECES=len(pieces.part), PIECES_B=power_of_two(len(pieces.part)), STRIDE=kind.qkv, GATED=kind.gated,
        num_warps=1,
    )  # fmt: skip
