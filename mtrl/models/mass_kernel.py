"""The kernel of `prompt_masses.py`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# mypy: disable-error-code="no-untyped-def"

LOG2E = tl.constexpr(1.4426950408889634)
KEYS = 64  # at a time


@triton.jit
def mass_kernel(
    query, key, lse, pools, rows, column, begin, end, out, scale, count, q_head, q_row, k_head, k_row, lse_head,
    SHARE: tl.constexpr, D: tl.constexpr, DB: tl.constexpr, M: tl.constexpr, N: tl.constexpr, POOLS: tl.constexpr,
):  # fmt: skip
    """The masses of M rows over the keys of their prompt, summed over the query heads that share a key head."""
    block, h = tl.program_id(0), tl.program_id(1)
    d, n, p = tl.arange(0, DB), tl.arange(0, N), tl.arange(0, POOLS)
    first = tl.load(rows + block * M)  # every block has one
    row = tl.load(rows + block * M + tl.arange(0, M))
    real = row >= 0
    at = tl.load(column + row, mask=real, other=0).to(tl.int64)
    stop = tl.load(end + row, mask=real, other=0)
    low, high = tl.load(begin + first), tl.max(stop, 0)
    masses = tl.zeros([M, POOLS], tl.float32)
    for i in range(SHARE):
        head = h * SHARE + i
        q = tl.load(query + head * q_head + at[:, None] * q_row + d[None, :],
                    mask=real[:, None] & (d < D)[None, :], other=0.0)  # fmt: skip
        top = tl.load(lse + head * lse_head + at, mask=real, other=0.0) * LOG2E
        for start in range(low, high, N):
            at_key = (start + n).to(tl.int64)
            here = at_key < high
            k = tl.load(key + h * k_head + at_key[:, None] * k_row + d[None, :],
                        mask=here[:, None] & (d < D)[None, :], other=0.0)  # fmt: skip
            score = tl.dot(q, k.T, input_precision="ieee") * scale
            mass = tl.where(at_key[None, :] < stop[:, None], tl.exp2(score - top[:, None]), 0.0)
            pool = tl.load(pools + at_key[:, None] * POOLS + p[None, :], mask=here[:, None], other=0.0)
            masses = tl.dot(mass.to(pool.dtype), pool, masses, input_precision="ieee")
    tl.store(out + (h * count + row)[:, None] * POOLS + p[None, :], masses, mask=real[:, None])


def launch(
    query: Tensor, key: Tensor, lse: Tensor, pools: Tensor, rows: Tensor, column: Tensor, begin: Tensor, end: Tensor,
    out: Tensor, scale: float,
) -> None:  # fmt: skip
    """Write `out` [key heads, M, pools], the sums over heads."""
    heads, key_heads, width = len(query), len(key), query.shape[2]
    assert query.stride(2) == key.stride(2) == lse.stride(1) == 1 and pools.is_contiguous()
    mass_kernel[(len(rows), key_heads)](
        query, key, lse, pools, rows, column, begin, end, out, scale * LOG2E.value, len(column), *query.stride()[:2],
        *key.stride()[:2], lse.stride(0), SHARE=heads // key_heads, D=width, DB=triton.next_power_of_2(width),
        M=rows.shape[1], N=KEYS, POOLS=pools.shape[1], num_warps=8, num_stages=2,
    )  # fmt: skip
