"""A token through a gated delta net, as Triton kernels; `tests/torch_ops.py` has them in torch.

Each response has a state and the last inputs of the convolution in its slot. They are read and written in place, so a
graph has neither copies nor indices of them. Rows without a response read zeros and write nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mtrl.models.recurrent import TAPS
from mtrl.rollout.decode.buffers import RecurrentStates, SlotTable, power_of_two
from mtrl.rollout.decode.fused_weights import RecurrenceWeights
from mtrl.rollout.decode.layers import Recurrence

# mypy: disable-error-code="no-untyped-def"

CONVOLVED_COLUMNS = 1024
STATE_COLUMNS = 32  # of a state's values in a program


@triton.jit
def convolve_kernel(
    x, weight, slot, taps, out, unused_slot, STRIDE: tl.constexpr, N: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """A causal convolution of width 4 and silu, channel by channel; the inputs move on by one token."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    s = tl.load(slot + r).to(tl.int64)
    real = c < tl.where(s != unused_slot, N, 0)
    past = taps + s * 3 * N + c
    x0, x1 = tl.load(past, mask=real, other=0.0), tl.load(past + N, mask=real, other=0.0)
    x2, x3 = tl.load(past + 2 * N, mask=real, other=0.0), tl.load(x + r * STRIDE + c, mask=real, other=0.0)
    w = weight + c * 4
    y = x0.to(tl.float32) * tl.load(w, mask=real, other=0.0).to(tl.float32)
    y += x1.to(tl.float32) * tl.load(w + 1, mask=real, other=0.0).to(tl.float32)
    y += x2.to(tl.float32) * tl.load(w + 2, mask=real, other=0.0).to(tl.float32)
    y += x3.to(tl.float32) * tl.load(w + 3, mask=real, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    y = y.to(dtype).to(tl.float32)
    tl.store(out + r * N + c, (y / (1 + tl.exp(-y))).to(dtype), mask=c < N)
    tl.store(past, x1, mask=real)
    tl.store(past + N, x2, mask=real)
    tl.store(past + 2 * N, x3, mask=real)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), exact where exp(x) is small against 1: the decay of thousands of tokens multiplies."""
    grown = tl.exp(tl.minimum(x, 20.0))
    one = 1.0 + grown
    small = tl.where(one == 1.0, 1.0, one - 1.0)
    return tl.where(x > 20.0, x, tl.where(one == 1.0, grown, tl.log(one) * (grown / small)))


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def update_state_kernel(
    mixed, rates, log_decay, bias, slot, state, out, unused_slot, scale,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Some values of one head of one row: the state decays, is corrected by what it says of the key, and is read.
    `rates` [rows, STRIDE] has the learning rates, then the decays, before their activations."""
    r, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s = tl.load(slot + r).to(tl.int64)
    dtype = out.dtype.element_ty
    k_at, v_at = tl.arange(0, K), tl.program_id(2) * BV + tl.arange(0, BV)
    row = mixed + r * (2 * HK * K + HV * V)
    head = h // (HV // HK) * K + k_at
    q = _unit(tl.load(row + head).to(tl.float32)) * scale
    k = _unit(tl.load(row + HK * K + head).to(tl.float32))
    v = tl.load(row + 2 * HK * K + h * V + v_at).to(tl.float32)
    beta = tl.load(rates + r * STRIDE + h).to(tl.float32)
    beta = (1 / (1 + tl.exp(-beta))).to(dtype).to(tl.float32)
    speed = tl.load(rates + r * STRIDE + HV + h).to(tl.float32) + tl.load(bias + h)
    decay = tl.exp(-tl.exp(tl.load(log_decay + h)) * _softplus(speed))
    live = k_at[:, None] < tl.where(s != unused_slot, K, 0)
    cell = state + ((s * HV + h) * K + k_at[:, None]) * V + v_at[None, :]
    x = tl.load(cell, mask=live, other=0.0) * decay
    correction = beta * (v - tl.sum(x * k[:, None], 0))
    x += k[:, None] * correction[None, :]
    tl.store(cell, x, mask=live)
    y = tl.sum(x * q[:, None], 0)
    tl.store(out + (r * HV + h) * V + v_at, tl.where(s != unused_slot, y, 0.0).to(dtype))


@triton.jit
def gated_norm_kernel(x, gate, weight, out, eps, HV: tl.constexpr, V: tl.constexpr, STRIDE: tl.constexpr):
    """The RMS norm of one head of one row, times silu(gate)."""
    r, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = tl.arange(0, V)
    y = tl.load(x + (r * HV + h) * V + v).to(tl.float32)
    z = tl.load(gate + r * STRIDE + h * V + v).to(tl.float32)
    dtype = out.dtype.element_ty
    y = (y * tl.rsqrt(tl.sum(y * y, 0) / V + eps)).to(dtype).to(tl.float32)
    y = (y * tl.load(weight + v).to(tl.float32)).to(dtype).to(tl.float32)
    tl.store(out + (r * HV + h) * V + v, (y * (z / (1 + tl.exp(-z)))).to(dtype))


# ------------------------------------------------------------------------------------------------------------ launching
def convolve(
    projected: Tensor, weight: Tensor, states: RecurrentStates, table: SlotTable, kind: Recurrence, out: Tensor
) -> None:
    """Queries, keys and values [rows, mixed] from the first numbers of `projected`."""
    assert states.taps.shape[1] == TAPS == 3
    convolve_kernel[(len(table.slot), -(-kind.mixed // CONVOLVED_COLUMNS))](
        projected, weight, table.slot, states.taps, out, table.unused_slot, STRIDE=kind.projected, N=kind.mixed,
        BN=min(CONVOLVED_COLUMNS, power_of_two(kind.mixed)),
    )  # fmt: skip


def update_state(
    mixed: Tensor, projected: Tensor, weights: RecurrenceWeights, states: RecurrentStates, table: SlotTable,
    kind: Recurrence, out: Tensor,
) -> None:  # fmt: skip
    columns = min(STATE_COLUMNS, kind.value_dim)
    update_state_kernel[(len(table.slot), kind.value_heads, kind.value_dim // columns)](
        mixed, projected[:, kind.mixed + kind.values :], weights.log_decay, weights.decay_bias, table.slot,
        states.state, out, table.unused_slot, kind.key_dim**-0.5, HK=kind.key_heads, HV=kind.value_heads,
        K=kind.key_dim, V=kind.value_dim, BV=columns, STRIDE=kind.projected,
    )  # fmt: skip


def gated_norm(
    read: Tensor, projected: Tensor, weight: Tensor, kind: Recurrence, eps: float, out: Tensor
) -> None:  # fmt: skip
    gated_norm_kernel[(len(read), kind.value_heads)](
        read, projected[:, kind.mixed :], weight, out, eps, HV=kind.value_heads, V=kind.value_dim,
        STRIDE=kind.projected, num_warps=1,
    )  # fmt: skip
