"""Each kernel of decoding against plain torch, by Triton's interpreter if there is no GPU."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import torch_ops as plain
from kernel_helpers import DEVICE, DTYPES, ROOM, close, noise, shuffled_slots

from mtrl.rollout.decode import layer_kernels, sampling_kernels
from mtrl.rollout.decode.buffers import AttentionPieces, KeysAndValues, Mode, Room, Rows, Rules, SlotTable, Tiles
from mtrl.rollout.decode.fused_weights import AttentionWeights, Projection
from mtrl.rollout.decode.layers import Attention, Norm

kernels = SimpleNamespace(**vars(layer_kernels) | vars(sampling_kernels))
HIDDEN, INNER, VOCABULARY, NORM = 24, 40, 200, Norm(1e-6)  # none of them is a power of two
KIND = Attention(heads=6, key_heads=2, head_dim=16, rotary=16, scale=0.25)  # 3 query heads share a key head
GATED = replace(KIND, gated=True, rotary=8)
NEIGHBOURS = replace(KIND, interleaved=True)
NORMS = [NORM, replace(NORM, one_plus=True)]


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


def running_rows(rows=16):
    """Every row somewhere in its response, on a slot that is not its own number."""
    state = Rows(ROOM, DEVICE)
    slots = torch.arange(rows, device=DEVICE)
    state.begin(slots, slots.int() + 5, torch.rand(rows, ROOM.new, dtype=torch.double).to(DEVICE))
    state.token[:] = torch.randint(0, VOCABULARY, (ROOM.slots + 1,)).int()
    state.count[:rows] = 1 + torch.arange(rows).int() % 9
    state.kv_index[:rows] = torch.arange(rows).int() * ROOM.new + state.count[:rows].cpu() - 1
    state.position[:rows] = state.first[:rows] + state.count[:rows] - 1
    return state


@pytest.mark.parametrize("norm, scale", zip(NORMS, [None, 4.875], strict=True), ids=["", "scaled"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_embed_norm(dtype, norm, scale):
    rows, slot = running_rows(), shuffled_slots()
    table, weight = noise(VOCABULARY, HIDDEN, dtype=dtype), noise(HIDDEN, dtype=dtype)
    made = []
    for ops in (kernels, plain):
        residual, out = noise(2, 16, HIDDEN, dtype=dtype)
        ops.embed_norm(slot, rows.token, table, weight, residual, out, norm, scale)
        made.append((residual, out))
    close(made[0][0], made[1][0], dtype)
    close(made[0][1], made[1][1], dtype)


@pytest.mark.parametrize(
    "norm, has_after", [(NORM, False), (NORM, True), (NORMS[1], True)], ids=["", "after", "1 + weight"]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm(dtype, norm, has_after):
    """With a norm of the update, too, and norms that multiply by 1 + weight."""
    update, before = noise(2, 16, HIDDEN, dtype=dtype)
    weight, after = noise(2, HIDDEN, dtype=dtype)
    made = []
    for ops in (kernels, plain):
        residual, out = before.clone(), torch.empty_like(before)
        ops.add_norm(update, residual, weight, out, norm, after if has_after else None)
        made.append((residual, out))
    magnitude = 4.0 if has_after else 0.0
    close(made[0][0], made[1][0], dtype, magnitude)
    close(made[0][1], made[1][1], dtype, magnitude)
    assert not torch.equal(made[0][0], before)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_mul(dtype, activation):
    both, made = 4 * noise(16, 2 * INNER, dtype=dtype), []
    for ops in (kernels, plain):
        made.append(torch.empty(16, INNER, dtype=dtype, device=DEVICE))
        ops.gate_mul(both, made[-1], activation)
    close(*made, dtype)


def attention_weights(bias, norms):
    nothing = Projection(torch.zeros(0))
    return AttentionWeights(
        nothing,
        bias=noise(KIND.qkv) if bias else None,
        query_norm=noise(KIND.head_dim) if norms else None,
        key_norm=noise(KIND.head_dim) if norms else None,
        out=nothing,
    )


@pytest.mark.parametrize(
    "bias, norms, norm, kind",
    [
        (True, False, NORM, KIND),
        (False, True, NORM, KIND),
        (False, True, NORMS[1], GATED),
        (True, False, NORM, NEIGHBOURS),
        (True, False, NORM, replace(NEIGHBOURS, rotary=8)),
    ],
    ids=["biased", "normed", "gated, of partial rotary positions", "of neighbours", "of some neighbours"],
)
def test_rotate_write(bias, norms, norm, kind):
    rows, slot, given = running_rows(), shuffled_slots(), attention_weights(bias, norms)
    qkv = noise(16, kind.qkv)
    angle = torch.arange(ROOM.positions, device=DEVICE)[:, None] * torch.rand(kind.rotary // 2, device=DEVICE)
    made = []
    for ops in (kernels, plain):
        query = torch.zeros(16, KIND.heads, KIND.head_dim, device=DEVICE)
        keys, values = torch.zeros(2, (ROOM.slots + 1) * ROOM.new, KIND.key_heads, KIND.head_dim, device=DEVICE)
        ops.rotate_write(qkv, given, kind, norm, (angle.cos(), angle.sin()), slot, rows, query, keys, values)
        made.append((query, keys, values))
    for found, expected in zip(*made, strict=True):
        close(found, expected)
        assert expected.any()
    written = made[0][1].flatten(1).any(1).nonzero().flatten().tolist()
    assert written == sorted(rows.kv_index[:16].tolist()), "each row writes only at its own index"


def pieces(of_prompt, least, most, chunk, rows=16):
    count = of_prompt + -(-ROOM.new // chunk)
    size = (count, rows, KIND.heads)
    part = torch.full((*size, KIND.head_dim), torch.nan, device=DEVICE)  # unwritten elements must not be read
    return AttentionPieces(of_prompt, least, most, chunk, 16, part, torch.full(size, torch.nan, device=DEVICE))


def random_cache(kind):
    def pair(tokens):
        return tuple(noise(2, tokens, kind.key_heads, kind.head_dim))

    return KeysAndValues(pair(ROOM.prompt_tokens), pair((ROOM.slots + 1) * ROOM.new))


CUTS = {"whole": (1, 64, 1, 12), "many pieces": (3, 16, 16, 4), "few that grow": (2, 8, 2, 12)}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_attend_in_pieces_equals_attention_over_all_keys(cut):
    """Prompts of 40, 7 and 1 tokens; groups of several rows, of one, and rows without a response."""
    rows, slot_table = running_rows(), SlotTable(16, ROOM, DEVICE)
    prompt_of = [0] * 3 + [1] * 4 + [2] * 3 + [0] * 6
    slot_table.assign([2, 3, 0, 5, 6, 9, 12], prompt_of, [0, 40, 47], [40, 7, 1])
    query = noise(16, KIND.heads, KIND.head_dim)
    cache = random_cache(KIND)
    made = []
    for ops in (kernels, plain):
        made.append(torch.empty(16, KIND.heads * KIND.head_dim, device=DEVICE))
        ops.attend(query, query, KIND, cache, slot_table, rows, pieces(*cut), made[-1])
    close(*made)
    assert made[1].any(1).tolist() == [True] * 7 + [False] * 9


def test_gates_multiply_what_attention_reads():
    rows, slot_table = running_rows(), SlotTable(4, ROOM, DEVICE)
    slot_table.assign([2, 3, 0], [0] * 3 + [1] * 13, [0, 40], [40, 7])
    query, qkv, cache, made = noise(4, KIND.heads, KIND.head_dim), noise(4, GATED.qkv), random_cache(KIND), []
    for ops, kind in ((kernels, GATED), (plain, GATED), (plain, KIND)):
        made.append(torch.empty(4, KIND.heads * KIND.head_dim, device=DEVICE))
        ops.attend(query, qkv, kind, cache, slot_table, rows, pieces(3, 16, 16, 4, rows=4), made[-1])
    close(*made[:2])
    gates = qkv[0, : 6 * 32].view(6, 2, 16)[:, 1].sigmoid().flatten()
    close(made[1][0], made[2][0] * gates)


@pytest.mark.parametrize("window", [1, 9, 30, 100])
def test_a_window_counts_along_a_rows_own_path(window):
    """Rows of a group with 9, 3 and 1 own tokens: some see no piece of their prompt of 40, or only its end. One that
    sees nothing of a block must not become NaN."""
    rows, slot_table = running_rows(), SlotTable(4, ROOM, DEVICE)
    slot_table.assign([8, 2, 0, 5], [0] * 4 + [1] * 4 + [0] * 8, [0, 40], [40, 7])
    query, cache = noise(4, KIND.heads, KIND.head_dim), random_cache(KIND)
    cut = replace(pieces(3, 16, 16, 4, rows=4), block=8 if DEVICE.type == "cpu" else 16)  # a GPU's products take 16

    def attend(ops, kind, table, query=query):
        out = torch.empty(4, KIND.heads * KIND.head_dim, device=DEVICE)
        ops.attend(query, query, kind, cache, table, rows, cut, out)
        return out

    kind = replace(KIND, window=window)
    found, expected = attend(kernels, kind, slot_table), attend(plain, kind, slot_table)
    close(found, expected)
    assert torch.equal(attend(plain, KIND, slot_table), expected) == (window == 100)
    alone = SlotTable(4, ROOM, DEVICE)
    alone.assign([2], [0] * 16, [0], [40])
    single = attend(kernels, kind, alone, query.roll(-1, 0))
    assert torch.equal(single[0], found[1]), "whatever rows it reads the prompt with"


def test_a_larger_room_changes_no_bit_of_attention():
    """It has more pieces, of prompts and of own tokens, which are empty here."""
    rows, slot_table = running_rows(), SlotTable(4, ROOM, DEVICE)
    slot_table.assign(range(4), [0] * 3 + [1], [0, 40], [40, 7])
    query = noise(4, KIND.heads, KIND.head_dim)
    cache = random_cache(KIND)
    made = []
    for of_prompt, spare in ((3, 0), (8, 5)):
        cut = pieces(of_prompt, 16, 8, 4, rows=4)
        part, lse = (torch.cat([each, *spare * [each[:1]]]) for each in (cut.part, cut.lse))
        made.append(torch.empty(4, KIND.heads * KIND.head_dim, device=DEVICE))
        kernels.attend(query, query, KIND, cache, slot_table, rows, replace(cut, part=part, lse=lse), made[-1])
    assert torch.equal(*made)


def tiles(width=64, rows=16):
    count = -(-VOCABULARY // width)
    return Tiles(width, *torch.full((2, rows, count), torch.nan, device=DEVICE))


def sampled(ops, raw, sampling, rows, slot, forbidden=(3, 70, 199), stops=(7, 11)):
    """Runs the kernels of a step: masses, the cut if any, the token."""
    rules, found = Rules(VOCABULARY, DEVICE), tiles()
    mode = rules.set(*sampling, forbidden, stops)
    logits = torch.empty_like(raw) if mode.cuts else None
    ops.tile_masses(raw, rules, logits, found)
    if logits is not None:
        cut = torch.empty(len(raw), device=DEVICE)
        ops.find_cut(logits, rules, mode, found, cut)
        ops.cut_masses(logits, cut, rules, found)
    ops.pick(raw if logits is None else logits, found, rules, mode, slot, rows, raw=logits is None)
    return found


SAMPLINGS = {  # temperature, top p, top k
    "greedy": (0.0, 0.9, 5),
    "temperature": (0.7, 1.0, 0),
    "top k": (1.0, 1.0, 7),
    "top p": (1.3, 0.8, 0),
    "both": (0.8, 0.5, 50),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_the_token_and_all_that_follows_from_it(sampling):
    rows, slot, raw = running_rows(), shuffled_slots(), 3 * noise(16, VOCABULARY)
    rows.limit[:8], rows.done[3] = 4, 1
    raw[5, 7] = 18.0  # a stop token, for sure
    twin = copy.deepcopy(rows)
    found, expected = sampled(kernels, raw, sampling, rows, slot), sampled(plain, raw, sampling, twin, slot)
    close(found.top, expected.top)
    close(found.mass, expected.mass)
    for name in ("token", "tokens", "count", "kv_index", "position", "done", "lengths"):
        assert torch.equal(getattr(rows, name), getattr(twin, name)), name
    close(rows.logps, twin.logps)
    assert not set(rows.token[:16].tolist()) & {3, 70, 199}, "forbidden"
    assert rows.done[:16].unique().tolist() == [0, 1] and rows.done[10] == 1, "row 5 sits on slot 10 and stopped"


def test_every_token_is_chosen_for_its_share_of_the_uniforms():
    """Uniforms from 0 to the largest below 1, over a distribution whose last tile is almost completely forbidden."""
    raw = noise(1, VOCABULARY).expand(16, -1).contiguous()
    uniforms = torch.linspace(0, 1, 16, dtype=torch.double)
    uniforms[-1] = 1 - 2**-53
    chosen = []
    for ops in (kernels, plain):
        rows = Rows(ROOM, DEVICE)
        rows.begin(torch.arange(16, device=DEVICE), torch.zeros(16, device=DEVICE).int(), uniforms[:, None].to(DEVICE))
        sampled(ops, raw, (1.0, 1.0, 0), rows, shuffled_slots(), forbidden=range(193, 200))
        chosen.append(rows.token[:16].tolist())
    assert chosen[0] == chosen[1] and chosen[0] == sorted(chosen[0])
    assert (chosen[0][0], chosen[0][-1]) == (0, 192) and len(set(chosen[0])) > 10


@pytest.mark.parametrize("sampling", ["greedy", "temperature", "both"])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_logits_without_probabilities_end_the_row_and_show(broken, sampling):
    rows, raw = running_rows(), noise(16, VOCABULARY)
    raw[4, 100] = broken
    sampled(kernels, raw, SAMPLINGS[sampling], rows, shuffled_slots(), stops=())
    slot, last = 11, int(rows.count[11]) - 1
    assert not rows.logps[slot, last].isfinite() and rows.done[slot] == 1
    assert 0 <= rows.token[slot] < VOCABULARY
    assert rows.done.sum() == 1 and rows.logps[:16].isfinite().sum() == rows.logps[:16].numel() - 1


def test_a_graph_reads_its_settings_from_memory():
    rules = Rules(200, DEVICE)
    modes = [rules.set(*sampling, (), ()) for sampling in SAMPLINGS.values()]
    assert modes == [Mode(True, False, False), Mode(False, False, False), Mode(False, True, False),
                     Mode(False, False, True), Mode(False, True, True)]  # fmt: skip
    assert not rules.set(1.0, 1.0, 200, (), ()).top_k, "all of the vocabulary is no cut"


def test_room_grows_and_never_shrinks():
    small = Room.for_batch([642] * 8, [100] * 8, n=8, new=256, slots=512)
    assert small.pieces_of_prompt == 4 and small.pieces == 5 and replace(small, longest=2**15).pieces_of_prompt == 16
    assert small.union(None) == small == small.union(replace(small, longest=512, slots=16))
    assert small.slots == 64 and small.groups == 8 and small.prompt_tokens >= 8 * 642
    assert Room.for_batch([640] * 8, [90] * 8, n=8, new=256, slots=512) == small, (
        "a batch a little smaller finds the same room"
    )
    large = Room.for_batch([5000], [5000], n=20, new=64, slots=512).union(small)
    few = Room.for_batch([642] * 64, [100] * 64, n=16, new=256, slots=100)
    assert few.slots == 112 and few.groups == 128 and few.prompt_tokens >= 64 * 642, "all prompts, some responses"
    assert large.longest >= 5000 and large.slots == 64 and large.new == 256 and large.positions >= 5064
