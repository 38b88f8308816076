"""The functions of `layer_kernels` and `sampling_kernels` in plain torch, with the same names and arguments: references
for tests, also used to run the engine without Triton."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from mtrl.algorithms.vocab import top_p_top_k
from mtrl.rollout.decode.buffers import (
    AttentionPieces,
    KeysAndValues,
    Mode,
    Pairs,
    RecurrentStates,
    Rows,
    Rules,
    SlotTable,
    Tiles,
)
from mtrl.rollout.decode.fused_weights import AttentionWeights, RecurrenceWeights
from mtrl.rollout.decode.layers import Attention, Mixture, Norm, Recurrence


def _rms(x: Tensor, weight: Tensor, norm: Norm) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    return (normed * (1.0 + weight.float())).to(x.dtype) if norm.one_plus else normed.to(x.dtype) * weight


def embed_norm(
    slot: Tensor, token: Tensor, table: Tensor, weight: Tensor, residual: Tensor, out: Tensor, norm: Norm,
    scale: float | None = None,
) -> None:  # fmt: skip
    residual.copy_(table[token[slot.long()].long()])
    if scale is not None:
        residual *= scale
    out.copy_(_rms(residual, weight, norm))


def add_norm(
    update: Tensor, residual: Tensor, weight: Tensor, out: Tensor, norm: Norm, after: Tensor | None = None
) -> None:  # fmt: skip
    residual += update if after is None else _rms(update, after, norm)
    out.copy_(_rms(residual, weight, norm))


def gate_mul(both: Tensor, out: Tensor, activation: str) -> None:
    gate, up = both.chunk(2, -1)
    out.copy_((F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up)


def rotate_write(
    qkv: Tensor, weights: AttentionWeights, kind: Attention, norm: Norm, angles: tuple[Tensor, Tensor], slot: Tensor,
    rows: Rows, query: Tensor, keys: Tensor, values: Tensor,
) -> None:  # fmt: skip
    projected = qkv if weights.bias is None else qkv + weights.bias
    queries, keys_and_values = projected.split([kind.heads * kind.query_dim, 2 * kind.key_heads * kind.head_dim], -1)
    q = queries.unflatten(-1, (-1, kind.query_dim))[..., : kind.head_dim]
    k, v = keys_and_values.unflatten(-1, (-1, kind.head_dim)).chunk(2, 1)
    if weights.query_norm is not None and weights.key_norm is not None:
        q, k = _rms(q, weights.query_norm, norm), _rms(k, weights.key_norm, norm)
    position, kv_index = rows.position[slot.long()].long(), rows.kv_index[slot.long()].long()
    cos, sin = (wave[position][:, None] for wave in angles)
    query.copy_(_rotated(q, cos, sin, kind.interleaved))
    keys[kv_index], values[kv_index] = _rotated(k, cos, sin, kind.interleaved), v


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    width = 2 * cos.shape[-1]
    x, rest = x[..., :width], x[..., width:]
    low, high = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)
    turned = low * cos - high * sin, high * cos + low * sin
    return torch.cat([torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1), rest], -1)


def attend(
    query: Tensor, qkv: Tensor, kind: Attention, cache: KeysAndValues, table: SlotTable, rows: Rows,
    pieces: AttentionPieces, out: Tensor,
) -> None:  # fmt: skip
    """Attends row by row over all keys at once; rows without a response become zeros."""
    out.zero_()
    groups = zip(table.members.tolist(), table.start.tolist(), table.length.tolist(), strict=True)
    spans = {row: (start, start + length) for members, start, length in groups for row in members if row >= 0}
    for row, slot in live_rows(table):
        low, high = spans.get(row, (0, 0))
        first, count = slot * rows.new, int(rows.count[slot])
        k, v = (
            torch.cat([shared[low:high], mine[first : first + count]])[-(kind.window or 0) :].transpose(0, 1)
            for shared, mine in zip(cache.prompts, cache.own, strict=True)
        )
        attended = F.scaled_dot_product_attention(query[row][:, None], k, v, scale=kind.scale, enable_gqa=True)
        out[row] = attended.flatten()
    if kind.gated:
        gates = qkv[:, : kind.heads * kind.query_dim].unflatten(-1, (-1, kind.query_dim))[..., kind.head_dim :]
        out *= gates.flatten(1).sigmoid()


def convolve(
    projected: Tensor, weight: Tensor, states: RecurrentStates, table: SlotTable, kind: Recurrence, out: Tensor
) -> None:
    for row, slot in live_rows(table):
        inputs = torch.cat([states.taps[slot], projected[row, None, : kind.mixed]])
        out[row] = F.silu(F.conv1d(inputs.T, weight, groups=kind.mixed)[:, 0])
        states.taps[slot] = inputs[1:]


def update_state(
    mixed: Tensor, projected: Tensor, weights: RecurrenceWeights, states: RecurrentStates, table: SlotTable,
    kind: Recurrence, out: Tensor,
) -> None:  # fmt: skip
    out.zero_()
    rates, speeds = projected[:, kind.mixed + kind.values :].chunk(2, -1)
    decays = (-weights.log_decay.exp() * F.softplus(speeds.float() + weights.decay_bias)).exp()
    keys, shared = kind.key_heads * kind.key_dim, kind.value_heads // kind.key_heads
    for row, slot in live_rows(table):
        q, k, v = mixed[row].float().split([keys, keys, kind.values])
        q, k = (
            (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(shared, 0)
            for each in (x.unflatten(0, (-1, kind.key_dim)) for x in (q, k))
        )
        state = states.state[slot] * decays[row, :, None, None]
        told = (state * k[..., None]).sum(1)
        correction = rates[row].sigmoid().float()[:, None] * (v.unflatten(0, (-1, kind.value_dim)) - told)
        state = state + k[..., None] * correction[:, None]
        states.state[slot] = state
        out[row] = ((state * q[..., None]).sum(1) * kind.key_dim**-0.5).flatten()


def gated_norm(
    read: Tensor, projected: Tensor, weight: Tensor, kind: Recurrence, eps: float, out: Tensor
) -> None:  # fmt: skip
    gate = projected[:, kind.mixed : kind.mixed + kind.values].float()
    normed = _rms(read.unflatten(-1, (-1, kind.value_dim)), weight, Norm(eps)).flatten(1)
    out.copy_(normed * F.silu(gate))


def route(
    logits: Tensor, correction: Tensor | None, kind: Mixture, table: SlotTable, rows: Rows, place: int, pairs: Pairs
) -> None:
    scores = logits.softmax(-1, dtype=torch.float32) if correction is None else logits.sigmoid()
    experts = (scores if correction is None else scores + correction).topk(kind.chosen).indices
    shares = scores.gather(-1, experts)
    for row, slot in live_rows(table):
        rows.experts[slot, min(int(rows.count[slot]), rows.new - 1), place] = experts[row].to(rows.experts.dtype)
    pairs.weight.copy_(shares / (shares.sum(-1, keepdim=True) + 1e-20) * kind.scale)
    pairs.expert.copy_(torch.where((table.slot == table.unused_slot)[:, None], logits.shape[1], experts))


def order_pairs(pairs: Pairs) -> None:
    experts = pairs.expert.flatten()
    pairs.order.copy_(experts.argsort(stable=True))
    pairs.start.copy_(torch.searchsorted(experts.sort().values, torch.arange(len(pairs.start), device=experts.device)))


def multiply_pairs(x: Tensor, matrices: Tensor, pairs: Pairs, out: Tensor, *, weighted: bool) -> None:
    share = pairs.expert.numel() // len(x)
    for expert, (low, high) in enumerate(pairwise(pairs.start.tolist())):
        each = pairs.order[low:high].long()
        product = x[each // share] @ matrices[expert].T
        out[each] = product * pairs.weight.flatten()[each, None] if weighted else product


def merge_experts(
    parts: Tensor, pairs: Pairs, table: SlotTable, x: Tensor, shared: tuple[Tensor, Tensor | None] | None, out: Tensor
) -> None:
    out.zero_()
    rows = [row for row, _ in live_rows(table)]
    merged = parts.unflatten(0, (-1, pairs.chosen))[rows].float().sum(1).to(out.dtype)
    own, gate = (None, None) if shared is None else (shared[0][rows], shared[1])
    if own is not None:
        merged += own if gate is None else F.linear(x[rows], gate).sigmoid() * own
    out[rows] = merged


def live_rows(table: SlotTable) -> list[tuple[int, int]]:
    """Rows that have a response, and their slots."""
    return [(row, slot) for row, slot in enumerate(table.slot.tolist()) if slot != table.unused_slot]


def tile_masses(raw: Tensor, rules: Rules, logits: Tensor | None, tiles: Tiles) -> None:
    made = raw.float() * rules.settings[0] + rules.forbidden
    if logits is not None:
        logits.copy_(made)
    _masses(made, tiles)


def cut_masses(logits: Tensor, cut: Tensor, rules: Rules, tiles: Tiles) -> None:
    logits.masked_fill_(logits < cut[:, None], -torch.inf)
    _masses(logits, tiles)


def _masses(logits: Tensor, tiles: Tiles) -> None:
    spare = tiles.count * tiles.width - logits.shape[1]
    by_tile = F.pad(logits, (0, spare), value=-torch.inf).unflatten(1, (tiles.count, tiles.width))
    tiles.top.copy_(by_tile.amax(-1))
    reference = torch.where(tiles.top == -torch.inf, 0.0, tiles.top)[..., None]
    tiles.mass.copy_((by_tile - reference).exp().sum(-1))


def find_cut(logits: Tensor, rules: Rules, mode: Mode, tiles: Tiles, cut: Tensor) -> None:
    _, top_p, top_k = rules.settings.tolist()
    kept = top_p_top_k(logits, top_p if mode.top_p else 1.0, int(top_k) if mode.top_k else 0)
    cut.copy_(torch.where(kept == -torch.inf, torch.inf, kept).amin(-1))


def pick(
    logits: Tensor, tiles: Tiles, rules: Rules, mode: Mode, slot: Tensor, rows: Rows, *, raw: bool
) -> None:  # fmt: skip
    """Samples by cumulative probabilities of the whole vocabulary, like the local engine."""
    made = logits.float() * rules.settings[0] + rules.forbidden if raw else logits
    logp = made.log_softmax(-1)
    slots = slot.long()
    i = rows.count[slots].long().clamp(max=rows.new - 1)
    if mode.greedy:
        chosen = made.argmax(-1)
    else:
        cumulated = logp.double().exp().cumsum(-1)
        reach = rows.uniforms[slots, i][:, None] * cumulated[:, -1:] * (1 - 1e-12)
        chosen = torch.searchsorted(cumulated, reach, right=True)[:, 0].clamp(max=made.shape[-1] - 1)
    _record(slots, i, chosen.int(), logp.gather(-1, chosen[:, None])[:, 0], rules, rows)


def _record(slots: Tensor, i: Tensor, chosen: Tensor, logp: Tensor, rules: Rules, rows: Rows) -> None:
    rows.token[slots], rows.tokens[slots, i], rows.logps[slots, i] = chosen, chosen, logp
    rows.count[slots] = i.int() + 1
    rows.kv_index[slots] = (slots * rows.new + i).int()
    rows.position[slots] = rows.first[slots] + i.int()
    was = rows.done[slots]
    ended = (rules.stops[chosen.long()] > 0) | (i + 1 >= rows.limit[slots]) | ~logp.isfinite()
    rows.lengths[slots] = rows.lengths[slots] + 1 - was
    rows.done[slots] = was | ended.int()
