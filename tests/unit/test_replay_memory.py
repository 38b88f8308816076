"""The replay memory: which groups it replaces, which values are restored unchanged, and how it survives a restart."""

import gc
import json
import math
import weakref
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from helpers import NAN, close, fake_experience, fake_prompt, fake_rollouts, same

from mtrl.algorithms.advantages import grpo
from mtrl.algorithms.credit import assign
from mtrl.algorithms.credit.trajectory_scaling import TrajectoryScaling
from mtrl.algorithms.replay import ReplayRule, exchange_groups
from mtrl.checkpoint.records import record_tensors
from mtrl.training.dynamic_sampling import CollectedBatch, PromptCounts
from mtrl.training.replay_memory import ReplayMemory
from mtrl.types import Rewards, Signals


class Source:
    def get(self, ids):
        return [fake_prompt(f"{name} read again", visual=not name.startswith("text")) for name in ids]


def make_step(names, rewards, old=-1.0, mass=False, **more):
    """Two responses of 1 and 2 tokens to each prompt, with a log-prob of `old` on every token."""
    count = len(names)
    rollouts = fake_rollouts([1, 2] * count, group=[place for place in range(count) for _ in range(2)])
    prompts = tuple(fake_prompt(name, visual=not name.startswith("text")) for name in names)
    rollouts = replace(rollouts, prompts=prompts, rollout_logprobs=torch.full(rollouts.mask.shape, old - 0.5))
    stream = torch.full(rollouts.mask.shape, old).where(rollouts.mask, 0.0)
    looked = {
        "attention_mass": torch.full((2 * count, 2, 5, 2), old),
        "prompt_attention_mass": torch.full((2 * count, 5, 2), old),
    }
    parts = {"accuracy": torch.tensor(rewards), "a/b": torch.full((2 * count,), NAN)}
    scored = Rewards(torch.tensor(rewards), parts, torch.zeros(2 * count, dtype=torch.bool), **more)
    signals = Signals(old_logprobs=stream, dependency=-stream, **(looked if mass else {}))
    experience = fake_experience(rollouts, signals, rewards=scored)
    return replace(experience, advantage=grpo(scored.total, rollouts.group, rollouts.mask))


def gathered(experience):
    return CollectedBatch(replace(experience, advantage=None), PromptCounts(used=len(experience.rollouts.prompts)))


def get_task_ids(experience):
    return [prompt.task.id for prompt in experience.rollouts.prompts]


@pytest.fixture
def memory():
    """Holds `a` and `c` of step 3, sampled by versions 0, 1 and 4, 5; `b` had no advantage."""
    memory = ReplayMemory(ReplayRule(4, 1e-6, 0.0), seed=7)
    result = memory.admit(make_step("abc", [0.0, 1.0, 1.0, 1.0, 0.0, 2.0], old=-2.0), (), step=3)
    assert result == {"replay/size": 2}
    return memory


# ------------------------------------------------------------------------------------------------------- what is stored
def test_only_groups_worth_it_are_stored(memory):
    # |A| = 1/sqrt 2 each, times std 1/sqrt 2 and 2/sqrt 2: scores 1 and 2.
    found = {entry.payload.task: (entry.key, entry.score) for entry in memory.buffer.entries}
    assert found.keys() == {"a", "c"} and found["a"][0] == (3, 0) and found["c"][0] == (3, 2)
    assert (found["a"][1], found["c"][1]) == pytest.approx((1.0, 2.0), rel=1e-5)
    strict = ReplayMemory(ReplayRule(4, 1e-6, 1.0), seed=7)
    strict.admit(make_step("abc", [0.0, 1.0, 1.0, 1.0, 0.0, 2.0]), (), step=0)
    assert [entry.payload.task for entry in strict.buffer.entries] == ["c"]


def test_replayed_groups_are_not_stored_again(memory):
    before = memory.buffer.entries
    memory.admit(make_step("xy", [0.0, 1.0, 0.0, 9.0]), replayed=(1,), step=5)
    assert {entry.key for entry in memory.buffer.entries} == {*(entry.key for entry in before), (5, 0)}


def test_entries_hold_no_prompts_and_no_pixels():
    pixels = np.zeros((4, 4, 3), dtype=np.uint8)
    gone = weakref.ref(pixels)
    experience = make_step("ab", [0.0, 1.0, 1.0, 0.0])
    prompts = tuple(replace(prompt, media=(pixels,)) for prompt in experience.rollouts.prompts)
    experience = replace(experience, rollouts=replace(experience.rollouts, prompts=prompts))
    memory = ReplayMemory(ReplayRule(4, 1e-6, 0.0), seed=7)
    memory.admit(experience, (), step=0)
    del pixels, prompts, experience
    gc.collect()
    assert gone() is None and len(memory.buffer.entries) == 2
    for entry in memory.buffer.entries:
        stored = entry.payload.experience
        assert stored.rollouts.prompts == () and stored.advantage is None and stored.credit is None


# ------------------------------------------------------------------------------------------------------ what comes back
def test_groups_replace_the_given_ones():
    experience = make_step("abcd", [0.0] * 8)
    others = [make_step([name], [float(i), 9.0]) for i, name in enumerate("xyz")]
    assert get_task_ids(exchange_groups(experience, [1, 3], others[:2])) == ["a", "x", "c", "y"]
    assert get_task_ids(exchange_groups(experience, [1, 3], others[:1])) == ["a", "x", "c", "d"]
    assert get_task_ids(exchange_groups(experience, [1], others)) == ["a", "x", "c", "d", "y", "z"]
    whole = exchange_groups(experience, [1], others)
    assert whole.rollouts.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert whole.rewards.total.tolist() == [0, 0, 0, 9, 0, 0, 0, 0, 1, 9, 2, 9]


def test_flat_groups_are_replaced_and_others_stay(memory):
    own = make_step("wxyz", [1.0, 1.0, 0.0, 1.0, 2.0, 2.0, 0.0, 1.0])
    found = memory.exchange(gathered(own), 4, step=8, source=Source())
    first, second, third, fourth = get_task_ids(found.experience)
    assert {first, third} == {"a read again", "c read again"} and (second, fourth) == ("x", "z")
    assert found.replayed == (0, 2) and get_task_ids(found.own) == ["w", "x", "y", "z"]
    assert found.metrics == {"replay/wanted": 2, "replay/hits": 2, "replay/age_mean": 5, "replay/age_max": 5}


def test_no_more_than_there_are(memory):
    found = memory.exchange(gathered(make_step("vwx", [1.0] * 6)), 3, step=4, source=Source())
    assert len(found.replayed) == 2 and get_task_ids(found.experience)[2] == "x"
    assert (found.metrics["replay/wanted"], found.metrics["replay/hits"]) == (3, 2)


def test_gaps_left_by_a_filter_are_filled_too(memory):
    own = make_step("wx", [1.0, 1.0, 0.0, 1.0])
    found = memory.exchange(gathered(own), 3, step=4, source=Source())
    assert (
        found.replayed == (0, 2)
        and get_task_ids(found.experience)[1] == "x"
        and len(get_task_ids(found.experience)) == 3
    )


def test_nothing_to_replace_and_nothing_stored_leave_the_step_as_it_is(memory):
    lively = gathered(make_step("wx", [0.0, 1.0, 2.0, 0.0]))
    found = memory.exchange(lively, 2, step=4, source=Source())
    assert found.experience is lively.experience and found.own is lively.experience and not found.replayed
    assert found.metrics == {"replay/wanted": 0, "replay/hits": 0}
    flat = gathered(make_step("wx", [1.0] * 4))
    empty = ReplayMemory(ReplayRule(4, 1e-6, 0.0), seed=7).exchange(flat, 2, step=4, source=Source())
    assert empty.experience is flat.experience and empty.metrics == {"replay/wanted": 2, "replay/hits": 0}


def test_ages_are_counted_in_steps(memory):
    memory.admit(make_step("d", [0.0, 1.0]), (), step=6)
    found = memory.exchange(gathered(make_step("xyz", [1.0] * 6)), 3, step=8, source=Source())
    assert found.metrics["replay/age_mean"] == 4 and found.metrics["replay/age_max"] == 5, "from 5, 5 and 2"


def test_draws_belong_to_seed_and_step(memory):
    def drawn(seed, step):
        memory.seed = seed
        own = gathered(make_step("w", [1.0, 1.0]))
        return get_task_ids(memory.exchange(own, 1, step, Source()).experience)[0]

    assert drawn(7, 5) == drawn(7, 5)
    assert len({drawn(7, step) for step in range(5, 25)}) == len({drawn(seed, 5) for seed in range(20)}) == 2


def test_replayed_values_are_unchanged_and_advantages_are_new(memory):
    # `a` was sampled at o = -2, b = -2.5, with rewards 0, 1; the current ones at o = -1, b = -1.5.
    memory.rule = replace(memory.rule, replay_buffer_size=1)
    memory.buffer = replace(memory.buffer, entries=memory.buffer.entries[1:])
    own = make_step("wx", [1.0, 1.0, 0.0, 1.0], old=-1.0)
    found = memory.exchange(gathered(own), 2, step=4, source=Source()).experience
    total, rollouts, signals = found.rewards.total, found.rollouts, found.signals
    assert total.tolist() == [0, 1, 0, 1]
    close(signals.old_logprobs, [[-2, 0], [-2, -2], [-1, 0], [-1, -1]])
    close(signals.dependency, [[2, 0], [2, 2], [1, 0], [1, 1]])
    assert rollouts.version.tolist() == [0, 1, 2, 3] and rollouts.text == ("row 0", "row 1", "row 2", "row 3")
    advantage = grpo(total, rollouts.group, rollouts.mask)
    close(advantage[:, 0], [-math.sqrt(0.5), math.sqrt(0.5)] * 2, rtol=1e-5)
    # S of rows 2, 2, 1, 1: u = 1, 1, 0, 0. From 0.8 up to a mean of 1: 1.2 and 0.8.
    found = replace(found, advantage=advantage)
    credit = assign((TrajectoryScaling(trajectory_scaling_min=0.8, trajectory_scaling_max=2.0),), found, (0, 0))
    close(credit.response_weight, [1.2, 1.2, 0.8, 0.8])
    close(rollouts.rollout_logprobs[:, 0], [-2.5, -2.5, -1.5, -1.5])


def test_token_weights_that_some_groups_lack_are_ones(memory):
    own = make_step("wx", [1.0, 1.0, 0.0, 1.0], token_weights=torch.full((4, 2), 3.0))
    found = memory.exchange(gathered(own), 2, step=4, source=Source())
    close(found.experience.rewards.token_weights, [[1, 1], [1, 1], [3, 3], [3, 3]])


def test_steps_without_images_do_not_take_the_attention_of_others_away():
    memory = ReplayMemory(ReplayRule(4, 1e-6, 0.0), seed=7)
    memory.admit(make_step(["text"], [0.0, 1.0]), (), step=0)
    own = make_step("wx", [1.0, 1.0, 0.0, 1.0], mass=True)
    found = memory.exchange(gathered(own), 2, step=4, source=Source()).experience
    assert found.signals.attention_mass[:2].eq(0).all() and found.signals.attention_mass[2:].eq(-1).all()
    assert found.signals.prompt_attention_mass[:2].eq(0).all()
    memory.admit(make_step("i", [0.0, 9.0]), (), step=1)  # an image whose attention was not read at that time
    found = memory.exchange(gathered(make_step("wx", [1.0] * 4, mass=True)), 2, step=4, source=Source()).experience
    assert found.signals.attention_mass is None


# ----------------------------------------------------------------------------------------------------- to disk and back
def assert_same_records(record, other):
    for f in fields(record):
        value, expected = getattr(record, f.name), getattr(other, f.name)
        if f.name in ("rollouts", "rewards", "signals"):
            assert_same_records(value, expected)
        elif isinstance(expected, torch.Tensor):
            assert value.dtype == expected.dtype
            same(value, expected)
        elif f.name == "parts":
            assert list(value) == list(expected)
            for name in expected:
                same(value[name], expected[name])
        else:
            assert value == expected, f.name


def test_a_restart_restores_it_bitwise(memory, tmp_path):
    weights, baseline = torch.tensor([[0.1, 0.2], [0.3, 0.4]]), torch.tensor([1 / 3, 2 / 3])
    more = make_step(["deep/é\n"], [0.1, 1 / 3], old=-1 / 3, mass=True, token_weights=weights, baseline=baseline)
    memory.admit(more, (), step=11)
    snapshot, entries = memory.snapshot(), memory.buffer.entries
    memory.admit(make_step("later", [0.0, 50.0] * 5), (), step=12)
    assert snapshot.detached().nbytes == sum(
        tensor.nbytes for entry in entries for tensor in record_tensors(entry.payload.experience).values()
    )
    snapshot.detached().write(tmp_path)
    restored = ReplayMemory(memory.rule, seed=7)
    restored.restore(tmp_path)
    assert [(e.key, e.score, e.payload.task, e.payload.step) for e in restored.buffer.entries] == [
        (e.key, e.score, e.payload.task, e.payload.step) for e in entries
    ]
    for entry, expected in zip(restored.buffer.entries, entries, strict=True):
        assert_same_records(entry.payload.experience, expected.payload.experience)
    assert restored.buffer.capacity == 4 and len(restored.buffer.entries) == 3
    assert {path.name for path in tmp_path.iterdir()} == {"groups.safetensors", "groups.json"}
    assert "pixels" not in (tmp_path / "groups.json").read_text()


def test_an_empty_memory_is_written_and_read(tmp_path):
    ReplayMemory(ReplayRule(4, 1e-6, 0.0), seed=7).snapshot().write(tmp_path)
    restored = ReplayMemory(ReplayRule(4, 1e-6, 0.0), seed=7)
    restored.restore(tmp_path)
    assert restored.buffer.entries == () and json.loads((tmp_path / "groups.json").read_text()) == []
