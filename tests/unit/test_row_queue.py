"""Rows wait for slots, and every row is decoded once, whatever the slots, the polls and the lengths."""

import pytest
import torch
from decode_helpers import engine, same, stopping_encoder
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import fresh_backbone, prompts_for

from mtrl.rollout.decode import row_queue
from mtrl.rollout.decode.row_queue import EndedRows, Poll, RowQueue
from mtrl.types import Sampling

FAMILY = "qwen2_5_vl"


class Device:
    """Counts the tokens of each slot as the kernels do: a flag stays until the slot begins anew."""

    def __init__(self, lengths, slots, tokens):
        self.lengths, self.tokens = lengths, tokens
        self.row, self.count, self.done = [-1] * slots, [0] * slots, [0] * slots

    def begin(self, slots, rows):
        for slot, row in zip(slots, rows, strict=True):
            self.row[slot], self.count[slot], self.done[slot] = row, 0, 0
        self.step(slots)

    def step(self, slots):
        for slot in slots:
            self.count[slot] += 1
            self.done[slot] |= self.count[slot] >= min(self.lengths[self.row[slot]], self.tokens)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=30), st.integers(1, 9), st.integers(1, 5), st.integers(1, 9))
def test_every_row_gets_all_its_tokens_once(lengths, slots, poll, tokens):
    queue, device = RowQueue(len(lengths), min(slots, len(lengths)), 1, tokens), Device(lengths, slots, tokens)
    finished, polls, busy = {}, [], 0
    device.begin(*queue.fill())
    while queue.live:
        if ended := queue.find_ended(polls[0] if len(polls) > 1 else None):
            counts = [device.count[slot] for slot in ended]
            for row, count in zip(queue.release(ended), counts, strict=True):
                assert row not in finished
                finished[row] = count
            device.begin(*queue.fill())
            continue
        device.step(queue.live)
        busy += len(queue.live)
        queue.now += 1
        if queue.now % poll == 0:
            polls = [*polls[-1:], Poll(queue.now, torch.tensor(device.done))]
    assert sorted(finished) == list(range(len(lengths)))
    needed = [min(length, tokens) for length in lengths]
    assert all(finished[row] >= needed[row] for row in finished)
    assert busy - sum(length - 1 for length in needed) <= len(lengths) * 2 * poll, "few steps over ended rows"


def test_rows_come_back_in_their_order():
    ended = EndedRows(3)
    experts = torch.arange(12).view(3, 2, 2, 1)  # two layers, one expert each
    ended.add([2, 0], (torch.tensor([[7, 8], [1, 2]]), torch.zeros(2, 2), experts[1:], torch.tensor([2, 1])))
    ended.add([1], (torch.tensor([[5, 6]]), torch.ones(1, 2), experts[:1], torch.tensor([2])))
    tokens, logps, routed = ended.split()
    assert [each.tolist() for each in tokens] == [[1], [5, 6], [7, 8]]
    assert [each.tolist() for each in logps] == [[0], [1, 1], [0, 0]]
    assert [each.flatten().tolist() for each in routed] == [[8, 9], [0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("slots", [1, 3, 5, 16])
def test_refilled_slots_give_the_same_responses(slots):
    encoder, sampling = stopping_encoder(FAMILY), Sampling(n=3, max_new_tokens=9)
    prompts = prompts_for(FAMILY)
    expected = engine(fresh_backbone(FAMILY), encoder).generate(prompts, sampling)
    assert len(set(expected.mask.sum(1).tolist())) > 2, "lengths differ"
    found = engine(fresh_backbone(FAMILY), encoder, rows_at_once=slots).generate(prompts, sampling)
    same(found, expected)


def test_a_free_slot_is_taken_before_the_longest_row_ends(monkeypatch):
    """Two slots decode rows of very different lengths in fewer steps than pairs of rows would."""
    filled = []
    fill = RowQueue.fill
    monkeypatch.setattr(row_queue.RowQueue, "fill", lambda queue: filled.append(queue.now) or fill(queue))
    encoder, sampling = stopping_encoder(FAMILY), Sampling(n=4, max_new_tokens=12)
    rollouts = engine(fresh_backbone(FAMILY), encoder, rows_at_once=2).generate(prompts_for(FAMILY)[:2], sampling)
    lengths = rollouts.mask.sum(1).tolist()
    pairs = sum(max(lengths[i : i + 2]) - 1 for i in range(0, len(lengths), 2))
    assert filled[-1] < pairs, (filled, lengths)


def test_a_new_batch_finds_the_unused_slot_empty():
    """Rows without a response share it; what they attend to must not grow from batch to batch."""
    generator, sampling = engine(fresh_backbone(FAMILY), stopping_encoder(FAMILY)), Sampling(n=1, max_new_tokens=9)
    counts = []
    for _ in range(2):
        generator.generate(prompts_for(FAMILY)[:1], sampling)
        counts.append(int(generator.buffers.rows.count[-1]))
    assert counts[0] == counts[1] > 0
