"""The gated delta rule, the recurrence of Qwen3.5's linear attention, in chunks of torch operations.

A head keeps a state S [key width, value width]. With decay a_t = exp(g_t) and learning rate b_t each token does

    S <- a_t S;    S <- S + b_t k_t (v_t - k_t S);    o_t = q_t S

Within a chunk this is a triangular system: the corrections u_t = b_t (v_t - k_t S_t) depend on earlier ones only
through products of keys. It is solved for all chunks at once; then states are carried from chunk to chunk. All of it is
computed in float32, whatever autocast says, since a state keeps its rounding errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
EPSILON = 1e-6  # of the norms of queries and keys


class Chunks(NamedTuple):
    """What does not depend on the state, for all chunks: [chunks * rows, heads, ..]."""

    from_values: Tensor  # [CHUNK, value width] corrections if the state were zero
    from_state: Tensor  # [CHUNK, key width] minus this times the state
    within: Tensor  # [CHUNK, CHUNK] how outputs read the corrections
    reading: Tensor  # [CHUNK, key width] how outputs read the state
    writing: Tensor  # [key width, CHUNK] how corrections change the state
    remaining: Tensor  # [1, 1] what is left of the state


def solve_chunks(q: Tensor, k: Tensor, v: Tensor, b: Tensor, g: Tensor) -> Chunks:
    q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + EPSILON) for each in (q, k))
    q = q * q.shape[-1] ** -0.5
    since_start = g[..., 0].cumsum(-1)  # log of the decay since the chunk began
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (since_start[..., :, None] - since_start[..., None, :]).masked_fill(later, -torch.inf).exp()
    # (1 + L) u = b v - (b k decayed) S, with L strictly lower: what earlier corrections of the chunk contribute.
    system = (b * k) @ k.transpose(-1, -2) * between
    right = torch.cat([b * v, b * k * since_start.exp()[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    from_values, from_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    return Chunks(
        from_values,
        from_state,
        within=q @ k.transpose(-1, -2) * between,
        reading=q * since_start.exp()[..., None],
        writing=(k * (since_start[..., -1:] - since_start).exp()[..., None]).transpose(-1, -2),
        remaining=since_start[..., -1].exp()[..., None, None],
    )


Solve = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Chunks]  # `solve_chunks`, or the same compiled


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    solve: Solve = solve_chunks,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Queries, keys, values [rows, length, heads, width] and g, beta [rows, length, heads] to outputs like values, and
    the last state [rows, heads, key width, value width]. The signature is that of the function of transformers that it
    replaces. Positions with g = beta = 0 leave the state as it is."""
    assert use_qk_l2norm_in_kernel, "queries and keys are normalized"
    with torch.autocast(query.device.type, enabled=False):
        parts = [split_chunks(each) for each in (query, key, value, beta[..., None], g[..., None])]
        solved = solve(*(each.flatten(0, 1) for each in parts))
        shape, wide = (len(query), value.shape[2], key.shape[3], value.shape[3]), parts[0].dtype
        state = solved.within.new_zeros(shape) if initial_state is None else initial_state.to(wide)
        chunks = (each.unflatten(0, (-1, len(query))) for each in solved)
        outputs = []
        for values, from_state, within, reading, writing, remaining in zip(*chunks, strict=True):
            corrections = values - from_state @ state
            outputs.append(reading @ state + within @ corrections)
            state = state * remaining + writing @ corrections
        output = torch.cat(outputs, dim=2)[:, :, : query.shape[1]].transpose(1, 2).to(value.dtype)
    return output, state if output_final_state else None


def split_chunks(values: Tensor) -> Tensor:
    """[rows, length, heads, width] -> [chunks, rows, heads, CHUNK, width] in float32 or wider, padded with zeros. A
    chunk of all rows is contiguous in memory, which its products are faster with."""
    padded = F.pad(values, (0, 0, 0, 0, 0, -values.shape[1] % CHUNK)).unflatten(1, (-1, CHUNK))
    wide = torch.promote_types(values.dtype, torch.float32)
    return padded.permute(1, 0, 3, 2, 4).to(wide, memory_format=torch.contiguous_format)


def find_chunk_dims(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, int]]:
    """The dimension of the arguments of `solve_chunks` that changes from call to call."""
    return ((tensor, 0) for tensor in tensors)
