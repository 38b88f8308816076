"""A prompt goes into the store once, however often it is sent, and leaves it with its last holder."""

import gc
import pickle
import weakref

import torch
from helpers import fake_batch, fake_rollouts

from mtrl.distributed.object_refs import ObjectRefs, PromptRef, resolve
from mtrl.types import Needs


class Store:
    def __init__(self):
        self.held, self.asked = {}, 0

    def put(self, value):
        self.held[len(self.held)] = pickle.dumps(value)
        return len(self.held) - 1

    def get(self, references):
        self.asked += 1
        return [pickle.loads(self.held[each]) for each in references]


def test_each_prompt_travels_once():
    store, rollouts = Store(), fake_rollouts([2, 1, 3], group=[0, 0, 1])
    refs, zeros = ObjectRefs(store.put), torch.zeros(3, 3)
    batch = fake_batch(rollouts, zeros, zeros)
    calls = [
        (list(rollouts.prompts), 7),
        (rollouts, Needs("old_logprobs"), 3),
        ([batch, batch.rows(torch.tensor([2]))], None),
    ]
    sent = [pickle.loads(pickle.dumps(refs.share(call))) for call in calls]
    assert len(store.held) == 2
    assert all(isinstance(each, PromptRef) for each in sent[1][0].prompts)

    prompts, probe, update = (resolve(call, store.get) for call in sent)
    assert store.asked == len(sent), "once for all prompts of a call"
    assert [prompt.task.id for prompt in prompts[0]] == ["p0", "p1"] and prompts[1] == 7
    assert [prompt.task.id for prompt in probe[0].prompts] == ["p0", "p1"] and probe[1:] == (Needs("old_logprobs"), 3)
    assert [prompt.task.id for prompt in update[0][1].rollouts.prompts] == ["p1"] and update[1] is None
    assert torch.equal(update[0][0].rollouts.tokens, rollouts.tokens)


def test_a_prompt_is_freed_with_its_last_reference():
    refs, rollouts = ObjectRefs(lambda prompt: prompt.task.id), fake_rollouts([2])
    refs.share(rollouts)
    seen = weakref.ref(rollouts.prompts[0])
    del rollouts
    gc.collect()
    assert seen() is None and not refs._refs
