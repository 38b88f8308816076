"""A pass of an update that runs out of device memory: the step restarts with smaller passes and ends with the same
gradients. There is no device here: the loss raises the error above a size, after its gradients were added."""

import logging
import weakref

import pytest
import torch
from update_helpers import FULL_LOSS, check_equal, full_batch, learn, make_actor, rollouts_for

from mtrl.utils.errors import DeviceFull
from mtrl.workers.micro_batches import MicroBatching

pytestmark = pytest.mark.usefixtures("little_garbage")

FAMILY = "qwen2_5_vl"


def count_tokens(batch):
    return sum(len(prompt.ids) for prompt in batch.rollouts.prompts) + int(batch.rollouts.mask.sum())


class Full:
    """The loss of an actor on a device with that much room. A pass that does not fit has left its gradients behind."""

    def __init__(self, actor, room, size=count_tokens):
        self.loss, self.room, self.size, self.tried = actor._loss, room, size, []
        self.held = weakref.WeakSet()
        actor._loss = self

    def __call__(self, batch, loss, prepared):
        assert not self.held, "tensors of the previous pass are still held"
        self.tried.append(self.size(batch))
        total, metrics = self.loss(batch, loss, prepared)
        if self.tried[-1] > self.room:
            total.backward()
            self.held.add(total)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. Of the allocated memory ..")
        return total, metrics


def largest_pass(batching):
    rollouts = rollouts_for(FAMILY)
    return max(count_tokens(full_batch(FAMILY).rows(rows)) for rows in batching.split(rollouts))


@pytest.mark.parametrize(
    "given", [MicroBatching(), MicroBatching(10**6), MicroBatching(rows=4), MicroBatching(rows=100)]
)
def test_the_step_ends_with_the_same_gradients(given, caplog):
    actor = make_actor(FAMILY, given)
    size, largest = (len, min(10, given.rows)) if given.rows else (count_tokens, largest_pass(given))
    full = Full(actor, largest - 1, size)
    with caplog.at_level(logging.WARNING):
        found = learn(actor, [full_batch(FAMILY)])
    (line,) = [record.getMessage() for record in caplog.records]
    half = largest // 2
    assert f"{half} {'responses' if given.rows else 'tokens'} per pass from now on" in line
    assert full.tried.count(largest) == 1, "the size that failed is not tried again"
    smaller = learn(make_actor(FAMILY, given.within(half)), [full_batch(FAMILY)])
    assert all(torch.equal(found.weights[name], weight) for name, weight in smaller.weights.items())
    assert found.metrics == smaller.metrics, "the failed pass does not count"
    check_equal(found, learn(make_actor(FAMILY), [full_batch(FAMILY)]))


def test_later_steps_keep_the_smaller_size():
    actor = make_actor(FAMILY)
    full = Full(actor, 5, len)
    actor.update([full_batch(FAMILY), full_batch(FAMILY)], FULL_LOSS)
    assert full.tried == [10, 5, 5, 5, 5]
    counters = actor.snapshot().counters
    assert counters["cut_to"] == 5, "a resumed run splits like this one"


def test_a_pass_that_does_not_fit_at_half_the_size_is_an_error():
    actor = make_actor(FAMILY)
    before = {name: weight.clone() for name, weight in actor.model.state_dict().items()}
    Full(actor, 4, len)
    with pytest.raises(DeviceFull, match=r"half a pass of an update\. CUDA out of .*tokens_per_micro_batch"):
        actor.update([full_batch(FAMILY)], FULL_LOSS)
    assert all(torch.equal(before[name], weight) for name, weight in actor.model.state_dict().items())
    assert all(parameter.grad is None for parameter in actor.learner.parameters)


def test_a_single_response_cannot_be_cut():
    actor = make_actor(FAMILY, MicroBatching(rows=1))
    Full(actor, 0, len)
    with pytest.raises(DeviceFull, match="no room to learn from a single response"):
        actor.update([full_batch(FAMILY)], FULL_LOSS)
