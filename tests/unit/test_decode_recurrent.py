"""The kernels of recurrent layers against plain torch, and against the rule over a whole sequence."""

import copy

import pytest
import torch

pytest.importorskip("triton")

import torch_ops as plain
from kernel_helpers import DEVICE, DTYPES, ROOM, close, noise

from mtrl.models.delta_rule import gated_delta_rule
from mtrl.models.recurrent import TAPS
from mtrl.rollout.decode import recurrent_kernels as kernels
from mtrl.rollout.decode.arena import Arena
from mtrl.rollout.decode.buffers import RecurrentStates, SlotTable
from mtrl.rollout.decode.fused_weights import Projection, RecurrenceWeights
from mtrl.rollout.decode.layers import Recurrence

KIND = Recurrence(key_heads=2, value_heads=6, key_dim=16, value_dim=64)  # 3 value heads share a key head
ROWS, LIVE = 16, [5, 0, 9]  # rows of a step, and the slots of its first ones


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


def slot_table():
    table = SlotTable(ROWS, ROOM, DEVICE)
    table.assign(LIVE, [0] * ROOM.slots, [0], [7])
    return table


def random_states(dtype=torch.float32):
    states = RecurrentStates.allocate(ROOM.slots, KIND, dtype, Arena(DEVICE))
    states.state.normal_()
    states.taps.normal_()
    return states


def weights():
    nothing, heads = Projection(torch.zeros(0)), KIND.value_heads
    speeds = torch.rand(heads, device=DEVICE).mul(3).log(), noise(heads)
    return RecurrenceWeights(nothing, noise(KIND.mixed, 1, TAPS + 1), *speeds, noise(KIND.value_dim), nothing)


def only_live_slots_changed(before, after):
    changed = (before != after).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == sorted(LIVE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_convolve(dtype):
    projected, weight = noise(ROWS, KIND.projected, dtype=dtype), noise(KIND.mixed, 1, TAPS + 1, dtype=dtype)
    given, made = random_states(dtype), []
    for ops in (kernels, plain):
        states, out = copy.deepcopy(given), torch.zeros(ROWS, KIND.mixed, dtype=dtype, device=DEVICE)
        ops.convolve(projected, weight, states, slot_table(), KIND, out)
        made.append((out, states.taps))
    close(made[0][0][: len(LIVE)], made[1][0][: len(LIVE)], dtype, magnitude=4.0)
    assert torch.equal(made[0][1], made[1][1])
    only_live_slots_changed(given.taps, made[0][1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_update_state(dtype):
    mixed, projected = noise(ROWS, KIND.mixed, dtype=dtype), noise(ROWS, KIND.projected, dtype=dtype)
    given, known, made = random_states(), weights(), []
    for ops in (kernels, plain):
        states, out = copy.deepcopy(given), torch.full((ROWS, KIND.values), torch.nan, dtype=dtype, device=DEVICE)
        ops.update_state(mixed, projected, known, states, slot_table(), KIND, out)
        made.append((out, states.state))
    assert not made[0][0][len(LIVE) :].any(), "zeros without a response"
    for found, expected in zip(*made, strict=True):
        close(found, expected, dtype, magnitude=8.0)
    only_live_slots_changed(given.state, made[0][1])


@pytest.mark.parametrize("ops", [kernels, plain], ids=["kernels", "plain"])
def test_steps_are_the_rule_over_a_sequence(ops):
    """Token by token from a state, against the trainer's chunks from the same one."""
    given, states, table, known = random_states(), random_states(), slot_table(), weights()
    states.state.copy_(given.state)
    mixed, projected = noise(5, ROWS, KIND.mixed), noise(5, ROWS, KIND.projected)
    outputs = []
    for t in range(5):
        outputs.append(torch.empty(ROWS, KIND.values, device=DEVICE))
        ops.update_state(mixed[t], projected[t], known, states, table, KIND, outputs[-1])
    sizes = [KIND.key_heads * KIND.key_dim] * 2 + [KIND.values]
    widths = KIND.key_dim, KIND.key_dim, KIND.value_dim
    parts = mixed[:, : len(LIVE)].transpose(0, 1).split(sizes, -1)
    q, k, v = (part.unflatten(-1, (-1, width)) for part, width in zip(parts, widths, strict=True))
    q, k = (each.repeat_interleave(3, dim=2) for each in (q, k))
    rates, speeds = projected[:, : len(LIVE), KIND.mixed + KIND.values :].transpose(0, 1).chunk(2, -1)
    decay = -known.log_decay.exp() * torch.nn.functional.softplus(speeds + known.decay_bias)
    expected, last = gated_delta_rule(q, k, v, decay, rates.sigmoid(), given.state[LIVE], output_final_state=True)
    found = torch.stack(outputs)[:, : len(LIVE)].transpose(0, 1)
    torch.testing.assert_close(found, expected.flatten(2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states.state[LIVE], last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_norm(dtype):
    read, projected = noise(ROWS, KIND.values, dtype=dtype), 3 * noise(ROWS, KIND.projected, dtype=dtype)
    weight, made = noise(KIND.value_dim, dtype=dtype), []
    for ops in (kernels, plain):
        made.append(torch.empty_like(read))
        ops.gated_norm(read, projected, weight, KIND, 1e-6, made[-1])
    close(*made, dtype, magnitude=4.0)


def test_responses_begin_with_the_state_of_their_prompt():
    states, prompts = random_states(), random_states()
    slots, parents = torch.tensor([3, 7, 1], device=DEVICE), torch.tensor([2, 0, 2], device=DEVICE)
    before = states.state.clone()
    states.begin(slots, prompts, parents)
    assert torch.equal(states.state[slots], prompts.state[parents])
    assert torch.equal(states.taps[slots], prompts.taps[parents])
    others = [i for i in range(ROOM.slots) if i not in slots.tolist()]
    assert torch.equal(states.state[others], before[others])
