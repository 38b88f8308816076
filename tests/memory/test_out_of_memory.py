"""A batch that runs out of device memory is sampled in smaller ones. There is no device here: `decode` raises the error
above a number of rows."""

import copy
import logging
import weakref
from dataclasses import replace

import pytest
import torch
import torch_ops as plain
from tiny_models import fresh_backbone, get_encoder, prompts_for

from mtrl.rollout.decode.engine import GraphGenerator
from mtrl.rollout.decode.step import Ops
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Sampling
from mtrl.utils.errors import DeviceFull

pytestmark = pytest.mark.usefixtures("little_garbage")

FAMILY = "qwen2_5_vl"
SAMPLING = Sampling(n=6, max_new_tokens=3)  # 24 responses to 4 prompts
ENGINES = {
    "plain": LocalGenerator,
    "graphs": lambda backbone, encoder: GraphGenerator(backbone, encoder, ops=Ops(plain, plain), buckets=(16, 32)),
}


@pytest.fixture
def encoder():
    """With many stop tokens, so that responses differ in length."""
    encoder = copy.copy(get_encoder(FAMILY))
    encoder.stop_ids = tuple(range(4, 512, 7))
    return encoder


@pytest.fixture(params=ENGINES)
def engine(request, encoder):
    return ENGINES[request.param](fresh_backbone(FAMILY), encoder)


class Full:
    """The `decode` of an engine on a device that has room for so many rows at a time. What failed is let go before the
    next."""

    def __init__(self, engine, room):
        self.engine, self.decode, self.room, self.tried, self.sampled = engine, engine.decode, room, [], []
        self.held = weakref.WeakSet()
        engine.decode = self

    def __call__(self, prompts, first, sampling):
        assert not self.held, "tensors of the previous batch are still held"
        rows = min(len(prompts) * sampling.n, self.engine.rows_at_once)
        self.tried.append(rows)
        made = self.decode(prompts, first, sampling)
        if rows > self.room:
            self.held.update(made[0])
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. Of the allocated memory ..")
        keys = zip(prompts, first, strict=True)
        self.sampled += [(p.task.id, start + i) for p, start in keys for i in range(sampling.n)]
        return made


@pytest.mark.parametrize(
    ("room", "tried", "halvings"),
    [
        pytest.param(12, [24, 12, 12], [12], id="whole groups"),
        pytest.param(7, [24, 12, 6, 6, 6, 6], [12, 6], id="a group at a time"),
        pytest.param(4, [24, 12, 6, *4 * [3, 3]], [12, 6, 3], id="parts of a group"),
    ],
)
def test_a_full_device_changes_no_tokens(engine, caplog, room, tried, halvings):
    prompts = prompts_for(FAMILY)
    expected = engine.generate(prompts, SAMPLING)
    full = Full(engine, room)
    with caplog.at_level(logging.WARNING):
        found = engine.generate(prompts, SAMPLING)
    if engine.rows_per_batch > engine.rows_at_once:  # fewer batches of the same sizes
        full.tried, tried = (list(dict.fromkeys(each)) for each in (full.tried, tried))
    assert full.tried == tried
    assert full.sampled == [(prompt.task.id, i) for prompt in prompts for i in range(6)], "each once"
    assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.mask, expected.mask)
    torch.testing.assert_close(found.rollout_logprobs, expected.rollout_logprobs, rtol=0, atol=1e-5)
    assert found.text == expected.text and torch.equal(found.group, expected.group)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(halvings)
    for line, rows in zip(said, halvings, strict=True):
        assert f"{2 * rows} responses at once: {rows} from now on" in line and "mtrl doctor" in line


def test_it_stays_halved_and_reports_it_once(engine, caplog):
    prompts = prompts_for(FAMILY)
    full = Full(engine, 12)
    engine.generate(prompts, SAMPLING)
    caplog.clear()
    engine.generate(prompts, replace(SAMPLING, step=1))
    assert full.tried[0] == 24 and set(full.tried[1:]) == {12} and not caplog.records


def test_finished_batches_are_kept(engine):
    """The device fills up while the second batch is sampled; a batch has 8 rows."""
    engine.rows_at_once = rows = 8 * engine.rows_at_once // engine.rows_per_batch
    full = Full(engine, 24)
    decode = full.__call__

    def filling(prompts, first, sampling):
        full.room = rows // 2 if len(full.tried) == 1 else full.room
        return decode(prompts, first, sampling)

    engine.decode = filling
    engine.generate(prompts_for(FAMILY)[:4], replace(SAMPLING, n=4))
    assert full.tried[:3] == [rows, rows, rows // 2] and set(full.tried[3:]) <= {rows // 2}
    assert len(set(full.sampled)) == len(full.sampled) == 16


def test_a_single_response_that_does_not_fit_is_reported(engine):
    Full(engine, 0)
    with pytest.raises(DeviceFull) as message:
        engine.generate(prompts_for(FAMILY), SAMPLING)
    said = str(message.value)
    assert said.startswith("the device has no room to sample a single response. CUDA out of memory. Tried to allocate")
    assert "dataset.max_prompt_length" in said and "Of the allocated" not in said


def test_other_errors_pass(engine):
    def broken(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine.decode = broken
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.generate(prompts_for(FAMILY), SAMPLING)
    assert engine.rows_at_once == 512


def test_buffers_for_larger_batches_are_let_go(encoder):
    engine = ENGINES["graphs"](fresh_backbone(FAMILY), encoder)
    Full(engine, 6)
    engine.generate(prompts_for(FAMILY), SAMPLING)
    assert engine.room.slots == 16 and engine.buffers.room == engine.room
