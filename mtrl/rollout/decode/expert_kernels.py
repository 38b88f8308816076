"""A mixture of experts, as Triton kernels; `tests/torch_ops.py` has them in torch.

A pair is a row and one of the experts that its router chose: pair number row * chosen + place. Pairs are ordered by
expert, and each expert in use multiplies its own, so a step reads the weights of these experts alone. The number of
pairs is that of the rows, so a graph can capture it. Rows without a response have no expert.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mtrl.rollout.decode.buffers import Pairs, Rows, SlotTable, power_of_two
from mtrl.rollout.decode.layers import Mixture

# mypy: disable-error-code="no-untyped-def"

ORDERED = 64  # pairs, or experts, whose place a program finds
COMPARED = 128  # pairs at a time that it compares them with
COLUMNS, DEPTH = 64, 64  # of a product's tile
MOST_PAIRS = 64  # of an expert at a time


@triton.jit
def route_kernel(
    logits, correction, slot, count, expert, weight, routed, unused_slot, new, place, scale,
    E: tl.constexpr, EB: tl.constexpr, TOP: tl.constexpr, TB: tl.constexpr, LAYERS: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """The experts of a row and their weights: the highest probabilities, divided by their sum; or (SIGMOID) the scores,
    of experts whose corrected scores are the highest. They are recorded for the token that follows."""
    r = tl.program_id(0)
    s = tl.load(slot + r)
    e, t = tl.arange(0, EB), tl.arange(0, TB)
    real = e < E
    x = tl.load(logits + r * E + e, mask=real, other=float("-inf"))
    wide = x.to(tl.float32)
    if SIGMOID:
        p = 1 / (1 + tl.exp(-wide))
        ranked = p + tl.load(correction + e, mask=real, other=0.0)
    else:
        p = tl.exp(wide - tl.max(wide, 0))
        p = p / tl.sum(p, 0)
        ranked = p
    ranked = tl.where(real, ranked, float("-inf"))
    chosen, shares = tl.full([TB], E, tl.int32), tl.zeros([TB], tl.float32)
    for j in tl.static_range(TOP):
        best = tl.minimum(tl.argmax(ranked, 0), E - 1)
        chosen = tl.where(t == j, best, chosen)
        shares = tl.where(t == j, tl.sum(tl.where(e == best, p, 0.0), 0), shares)
        ranked = tl.where(e == best, float("-inf"), ranked)
    i = tl.minimum(tl.load(count + s), new - 1)
    row = routed + ((s.to(tl.int64) * new + i) * LAYERS + place) * TOP
    tl.store(row + t, chosen.to(routed.dtype.element_ty), mask=t < tl.where(s != unused_slot, TOP, 0))
    tl.store(expert + r * TOP + t, tl.where(s == unused_slot, E, chosen), mask=t < TOP)
    shares = shares / (tl.sum(shares, 0) + 1e-20) * scale  # scores may all be 0
    tl.store(weight + r * TOP + t, shares.to(weight.dtype.element_ty), mask=t < TOP)


@triton.jit
def order_pairs_kernel(
    expert, order, start, E: tl.constexpr, PAIRS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Each pair's place among all, ordered by expert and then by number; then the first place of each expert."""
    program = tl.program_id(0)
    pair_programs: tl.constexpr = (PAIRS + N - 1) // N
    i = program * N + tl.arange(0, N)
    mine = tl.load(expert + i, mask=i < PAIRS, other=E)
    if program >= pair_programs:
        i = (program - pair_programs) * N + tl.arange(0, N)
        mine = i
    before = tl.zeros([N], tl.int32)
    for first in range(0, PAIRS, BLOCK):
        j = first + tl.arange(0, BLOCK)
        other = tl.load(expert + j, mask=j < PAIRS, other=E + 1)
        earlier = other[None, :] < mine[:, None]
        if program < pair_programs:
            earlier = earlier | ((other[None, :] == mine[:, None]) & (j[None, :] < i[:, None]))
        before += tl.sum(earlier.to(tl.int32), 1)
    if program < pair_programs:
        tl.store(order + before, i, mask=i < PAIRS)
    else:
        tl.store(start + i, before, mask=i <= E)


@triton.jit
def multiply_pairs_kernel(
    x, matrices, order, start, weight, out,
    K: tl.constexpr, N: tl.constexpr, SHARE: tl.constexpr, WEIGHTED: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """x[pair // SHARE] @ matrices[expert].T for the pairs of one expert, some columns; WEIGHTED: times the pair's
    weight."""
    e = tl.program_id(0)
    low, high = tl.load(start + e), tl.load(start + e + 1)
    n, m = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, M)
    dtype = x.dtype.element_ty
    matrix = matrices + e.to(tl.int64) * N * K
    for first in range(low, high, M):
        live = first + m < high
        pair = tl.load(order + first + m, mask=live, other=0).to(tl.int64)
        total = tl.zeros([M, BN], tl.float32)
        for depth in range(0, K, BK):
            k = depth + tl.arange(0, BK)
            a = tl.load(x + (pair // SHARE)[:, None] * K + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0.0)
            b = tl.load(matrix + n[:, None] * K + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
            total = tl.dot(a, b.T, total, input_precision="ieee")
        y = total.to(dtype)
        if WEIGHTED:
            y = y.to(tl.float32) * tl.load(weight + pair, mask=live, other=0.0).to(tl.float32)[:, None]
            y = y.to(out.dtype.element_ty)
        tl.store(out + pair[:, None] * N + n[None, :], y, mask=live[:, None] & (n < N)[None, :])


@triton.jit
def merge_experts_kernel(
    parts, slot, x, shared, gate, out, unused_slot,
    H: tl.constexpr, HB: tl.constexpr, TOP: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The sum of a row's pairs, in float32, plus (SHARED) the shared expert, times the sigmoid of its gate (GATED)."""
    r = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HB)
    dtype = out.dtype.element_ty
    real = h < tl.where(tl.load(slot + r) != unused_slot, H, 0)
    total = tl.zeros([HB], tl.float32)
    for j in tl.static_range(TOP):
        total += tl.load(parts + (r * TOP + j) * H + h, mask=real, other=0.0).to(tl.float32)
    y = total.to(dtype)
    if SHARED:
        own = tl.load(shared + r * H + h, mask=real, other=0.0)
        if GATED:
            read = tl.load(x + r * H + h, mask=real, other=0.0).to(tl.float32)
            opened = tl.sum(read * tl.load(gate + h, mask=real, other=0.0).to(tl.float32), 0).to(dtype).to(tl.float32)
            opened = (1 / (1 + tl.exp(-opened))).to(dtype).to(tl.float32)
            own = (own.to(tl.float32) * opened).to(dtype)
        y = (y.to(tl.float32) + own.to(tl.float32)).to(dtype)
    tl.store(out + r * H + h, y, mask=h < H)


# ------------------------------------------------------------------------------------------------------------ launching
def route(
    logits: Tensor, correction: Tensor | None, kind: Mixture, table: SlotTable, rows: Rows, place: int, pairs: Pairs
) -> None:
    """`place`: of the layer, among those with a mixture."""
    route_kernel[(len(logits),)](
        logits, logits if correction is None else correction, table.slot, rows.count, pairs.expert, pairs.weight,
        rows.experts, table.unused_slot, rows.new, place, kind.scale, E=kind.experts, EB=power_of_two(kind.experts),
        TOP=kind.chosen, TB=power_of_two(kind.chosen), LAYERS=rows.experts.shape[2], SIGMOID=correction is not None,
        num_warps=1,
    )  # fmt: skip


def order_pairs(pairs: Pairs) -> None:
    experts, count = len(pairs.start) - 1, pairs.expert.numel()
    order_pairs_kernel[(-(-count // ORDERED) + -(-(experts + 1) // ORDERED),)](
        pairs.expert, pairs.order, pairs.start, E=experts, PAIRS=count, N=ORDERED,
        BLOCK=min(COMPARED, power_of_two(count)),
    )  # fmt: skip


def multiply_pairs(x: Tensor, matrices: Tensor, pairs: Pairs, out: Tensor, *, weighted: bool) -> None:
    """From a row of x for each row, or for each pair."""
    experts, columns, depth = matrices.shape
    count = pairs.expert.numel()
    multiply_pairs_kernel[(experts, -(-columns // COLUMNS))](
        x, matrices, pairs.order, pairs.start, pairs.weight, out, K=depth, N=columns, SHARE=count // len(x),
        WEIGHTED=weighted, M=min(MOST_PAIRS, power_of_two(-(-2 * count // experts), 16)), BN=COLUMNS, BK=DEPTH,
        num_stages=3,
    )  # fmt: skip


def merge_experts(
    parts: Tensor, pairs: Pairs, table: SlotTable, x: Tensor, shared: tuple[Tensor, Tensor | None] | None, out: Tensor
) -> None:
    """`shared`: what the shared expert says of x, and the weight of its gate."""
    rows, width = out.shape
    own, gate = (x, None) if shared is None else shared
    merge_experts_kernel[(rows,)](
        parts, table.slot, x, own, x if gate is None else gate, out, table.unused_slot, H=width,
        HB=power_of_two(width), TOP=pairs.chosen, SHARED=shared is not None, GATED=gate is not None,
    )  # fmt: skip
