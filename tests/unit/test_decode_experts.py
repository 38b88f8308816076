"""The kernels of mixtures of experts against plain torch."""

import copy
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import torch_ops as plain
from kernel_helpers import DEVICE, DTYPES, ROOM, close, noise

from mtrl.rollout.decode import expert_kernels as kernels
from mtrl.rollout.decode.buffers import Pairs, Rows, SlotTable
from mtrl.rollout.decode.layers import Mixture

KIND = Mixture(experts=5, chosen=2, inner=24, shared=0)
SIGMOID = replace(KIND, sigmoid=True, scale=2.5)
HIDDEN, ROWS, LIVE = 40, 16, [5, 0, 9, 3, 11]  # rows of a step, and the slots of its first ones
LAYERS = 3  # that have a mixture


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


def slot_table():
    table = SlotTable(ROWS, ROOM, DEVICE)
    table.assign(LIVE, [0] * ROOM.slots, [0], [7])
    return table


def empty_pairs(dtype=torch.float32):
    def empty(*size, dtype=torch.int32):
        return torch.full(size, 77, dtype=dtype, device=DEVICE)

    chosen = (ROWS, KIND.chosen)
    return Pairs(empty(*chosen), empty(*chosen, dtype=dtype), empty(ROWS * KIND.chosen), empty(KIND.experts + 1))


def random_scores(kind, dtype=torch.float32):
    """Logits, and a correction if the router has one."""
    torch.manual_seed(0)
    return 3 * noise(ROWS, kind.experts, dtype=dtype), noise(kind.experts) if kind.sigmoid else None


def routed(ops, dtype=torch.float32, kind=KIND):
    """Rows that were routed, and their pairs in order."""
    rows, pairs = Rows(ROOM, DEVICE, [kind] * LAYERS), empty_pairs(dtype)
    rows.count[: ROOM.slots] = torch.arange(ROOM.slots).int() % ROOM.new
    ops.route(*random_scores(kind, dtype), kind, slot_table(), rows, 1, pairs)
    ops.order_pairs(pairs)
    return rows, pairs


@pytest.mark.parametrize("dtype, kind", [*((each, KIND) for each in DTYPES), (torch.float32, SIGMOID)], ids=str)
def test_routes_and_their_order(dtype, kind):
    (rows, found), (twin, expected) = routed(kernels, dtype, kind), routed(plain, dtype, kind)
    for name in ("expert", "order", "start"):
        ours, theirs = (getattr(each, name) for each in (found, expected))
        if name == "expert":
            assert torch.equal(ours, theirs)
            assert (ours[len(LIVE) :] == KIND.experts).all(), "rows without a response have no expert"
        assert torch.equal(ours, theirs), name
    close(found.weight[: len(LIVE)], expected.weight[: len(LIVE)], dtype)
    assert torch.equal(rows.experts, twin.experts)
    for row, slot in enumerate(LIVE):
        assert rows.experts[slot, int(rows.count[slot]), 1].tolist() == found.expert[row].tolist()
    assert int(rows.experts[:, :, [0, 2]].sum()) == 0, "other layers are left alone"
    assert found.start[-1] == len(LIVE) * KIND.chosen


@pytest.mark.parametrize("ops", [kernels, plain], ids=["kernel", "twin"])
def test_a_correction_chooses_experts_and_does_not_weigh_them(ops):
    (_, pairs), (logits, correction) = routed(ops, kind=SIGMOID), random_scores(SIGMOID)
    live, scores = len(LIVE), logits.sigmoid()
    for each, chosen in zip(scores[:live], pairs.expert[:live].tolist(), strict=True):
        assert set(chosen) == set((each + correction).argsort(descending=True)[:2].tolist())
    weights = scores[:live].gather(1, pairs.expert[:live].long())
    close(pairs.weight[:live], 2.5 * weights / weights.sum(1, keepdim=True))
    without = scores[:live].topk(2).indices.sort().values
    assert not torch.equal(pairs.expert[:live].sort().values.long(), without), "it matters"


def test_more_pairs_and_experts_than_a_program_orders():
    experts, chosen, rows = 150, 3, 70
    expert = torch.randint(0, experts + 1, (rows, chosen), device=DEVICE).int()
    made = []
    for ops in (kernels, plain):
        order, start = torch.zeros(rows * chosen).int().to(DEVICE), torch.zeros(experts + 1).int().to(DEVICE)
        made.append(Pairs(expert, expert, order, start))
        ops.order_pairs(made[-1])
    assert torch.equal(made[0].order, made[1].order) and torch.equal(made[0].start, made[1].start)


@pytest.mark.parametrize("dtype", DTYPES if DEVICE.type == "cuda" else DTYPES[:1])  # interpreted, no bf16 products
def test_products_of_the_experts_in_use(dtype):
    """From a row for each row, then from one for each pair, times the pair's weight."""
    _, pairs = routed(plain, dtype)
    live = len(LIVE) * KIND.chosen
    x, up, down = (noise(*size, dtype=dtype) for size in ((ROWS, HIDDEN), (5, 48, HIDDEN), (5, HIDDEN, 48)))
    made = []
    for ops in (kernels, plain):
        both, parts = (torch.zeros(ROWS * KIND.chosen, n, dtype=dtype, device=DEVICE) for n in (48, HIDDEN))
        ops.multiply_pairs(x, up, pairs, both, weighted=False)
        given = copy.deepcopy(both) if not made else made[0][0]
        ops.multiply_pairs(given, down, pairs, parts, weighted=True)
        made.append((both, parts))
    for found, expected in zip(*made, strict=True):
        close(found[:live], expected[:live], dtype, magnitude=20.0)
        assert not found[live:].any(), "rows without a response cost no product"


@pytest.mark.parametrize("shared", ["gated", "plain", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_experts(dtype, shared):
    """Without a gate as in GLM, whose pairs are summed before they are rounded."""
    _, pairs = routed(plain, dtype)
    parts = noise(ROWS * KIND.chosen, HIDDEN, dtype=torch.float32 if shared == "plain" else dtype)
    x, own, gate = noise(ROWS, HIDDEN, dtype=dtype), noise(ROWS, HIDDEN, dtype=dtype), noise(1, HIDDEN, dtype=dtype)
    shared = {"gated": (own, gate), "plain": (own, None), "none": None}[shared]
    made = []
    for ops in (kernels, plain):
        made.append(torch.full((ROWS, HIDDEN), torch.nan, dtype=dtype, device=DEVICE))
        ops.merge_experts(parts, pairs, slot_table(), x, shared, made[-1])
    torch.testing.assert_close(
        *made, rtol=3e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-1 * (dtype == torch.bfloat16) + 1e-5
    )
    assert not made[0][len(LIVE) :].any() and made[0][: len(LIVE)].any(1).all()
