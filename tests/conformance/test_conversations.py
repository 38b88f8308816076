"""Responses with tool calls: engines and trainer read the same conversation, however its turns were batched."""

import time
from dataclasses import replace

import pytest
import torch
from conversation_helpers import SAMPLING, calls, check_log_probs, conversing
from test_generator import ENGINES, TOLERANCE
from tiny_models import get_encoder, prompts_for, shared_backbone

from mtrl.environments.records import ToolCall
from mtrl.models.forward import Forward
from mtrl.rollout import conversations
from mtrl.types import Sampling
from mtrl.utils.errors import RunError

__all__ = ["calls"]

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "llama")


@pytest.mark.parametrize("engine", ["local", "decode"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainer_has_the_engines_log_probs(family, engine, calls, tmp_path):
    with conversing(tmp_path, family, ENGINES[engine]) as generator, generator.resident():
        rollouts = generator.generate(prompts_for(family)[:3], SAMPLING)
    check_log_probs(rollouts, family, max(TOLERANCE, 1e-4))


@pytest.mark.parametrize("barrier", [False, True])
def test_the_time_that_tools_take_changes_nothing(barrier, monkeypatch, tmp_path):
    """In float32 on a CPU the tokens are equal in other batches, and their log-probs but for rounding. With a barrier
    the batches are the same, too."""
    found = []
    for delays in ([0.0], [0.3, 0.0, 0.1, 0.0, 0.2, 0.0, 0.1]):
        waits = iter(delays * 100)
        call = lambda text, schemas, waits=waits: [ToolCall("look", {"wait": next(waits)})]  # noqa: E731
        monkeypatch.setattr(conversations, "parse_tool_calls", call)
        with conversing(tmp_path, "qwen2_5_vl") as generator:
            generator.barrier = barrier
            found.append(generator.generate(prompts_for("qwen2_5_vl")[:3], SAMPLING))
    first, second = found
    assert torch.equal(first.tokens, second.tokens) and texts(first) == texts(second)
    gap = (first.rollout_logprobs - second.rollout_logprobs).abs().max()
    assert gap == 0 if barrier else gap < 1e-5


def texts(rollouts):
    return [[turn.message.task.text for turn in each.turns] for each in rollouts.observations]


def test_responses_without_calls_are_those_of_the_engine(tmp_path):
    prompts = prompts_for("qwen2_5_vl")[:2]
    with conversing(tmp_path, "qwen2_5_vl") as generator:
        found = generator.generate(prompts, SAMPLING)
        expected = generator.engine.generate(prompts, SAMPLING)
    assert torch.equal(found.tokens, expected.tokens) and found.text == expected.text
    assert torch.equal(found.rollout_logprobs, expected.rollout_logprobs)
    assert found.finish_reason == expected.finish_reason and not any(each.turns for each in found.observations)


def test_a_message_that_leaves_no_room_ends_the_response(calls, tmp_path):
    with conversing(tmp_path, "qwen2_5_vl") as generator:
        whole = generator.generate(prompts_for("qwen2_5_vl")[:2], SAMPLING)
        limit = int(whole.read_tokens.max()) - 1
        short = generator.generate(prompts_for("qwen2_5_vl")[:2], replace(SAMPLING, max_new_tokens=limit))
    assert (short.read_tokens <= limit).all() and "length" in short.finish_reason
    for row, reason in enumerate(short.finish_reason):
        kept = int(short.mask[row].sum())
        assert torch.equal(short.tokens[row, :kept], whole.tokens[row, :kept])
        assert reason == "length" or len(short.observations[row].turns) == len(whole.observations[row].turns)


def test_an_image_that_the_model_cannot_take_is_an_error_for_it_to_read(calls, tmp_path):
    with conversing(tmp_path, "qwen2_5_vl", name="Strips", max_turns=1) as generator:
        rollouts = generator.generate(prompts_for("qwen2_5_vl")[:1], SAMPLING)
    (turn, *_) = [turn for each in rollouts.observations for turn in each.turns]
    assert turn.errors == 1 and not turn.message.media and "longer than 200 times" in turn.message.task.text


def test_what_reset_says_ends_the_prompt(calls, tmp_path):
    prompts = prompts_for("qwen2_5_vl")[:2]
    with conversing(tmp_path, "qwen2_5_vl", name="Greets") as generator:
        rollouts = generator.generate(prompts, SAMPLING)
    for before, after in zip(prompts, rollouts.prompts, strict=True):
        assert after.task.text == before.task.text + "look here<image>" and len(after.media) == len(before.media) + 1
        assert after.task.id == before.task.id
    trainer = Forward(shared_backbone("qwen2_5_vl"), get_encoder("qwen2_5_vl"))
    gap = (trainer.signals(rollouts).old_logprobs - rollouts.rollout_logprobs)[rollouts.mask].abs().max()
    assert gap < 1e-4


def test_all_responses_to_a_prompt_begin_alike(calls, tmp_path):
    prompts = prompts_for("llama")[:2]
    with conversing(tmp_path, "llama", name="Draws") as generator:
        rollouts = generator.generate(prompts, SAMPLING)
        first, second = (each.task.text.split("?")[-1] for each in rollouts.prompts)
        assert first != second, "prompts draw other numbers"
    with (
        conversing(tmp_path, "llama", name="Differs") as generator,
        pytest.raises(RunError, match="different contents for the responses to one prompt"),
    ):
        generator.generate(prompts, SAMPLING)


def test_whoever_is_ready_continues(monkeypatch, tmp_path):
    """One slow tool does not hold up the others: their later turns are sampled while it runs."""
    slow = iter([1.5] + [0.0] * 100)
    monkeypatch.setattr(
        conversations, "parse_tool_calls", lambda text, schemas: [ToolCall("look", {"wait": next(slow)})]
    )
    sizes, times = [], []

    def engine(family, encoder):
        inner = ENGINES["local"](family, encoder)
        generate = inner.generate

        def timed(prompts, sampling):
            sizes.append(len(prompts))
            times.append(time.monotonic())
            return generate(prompts, sampling)

        inner.generate = timed
        return inner

    with conversing(tmp_path, "llama", engine=engine, call_seconds=20) as generator:
        prompts = prompts_for("llama")[:2]
        rollouts = generator.generate(prompts, Sampling(n=1, max_new_tokens=400, seed=5, step=2))
    assert [len(each.turns) for each in rollouts.observations] == [3, 3]
    assert sizes == [2, 1, 1, 1, 1, 1, 1], "the second response is through before the first one's tool returns"
    assert times[3] < times[4], sizes


def test_environments_end_after_the_rewards_of_their_call_and_the_next(tmp_path):
    prompts = prompts_for("llama")[:1]
    with conversing(tmp_path, "llama") as generator:
        ids = []
        for step in range(3):
            rollouts = generator.generate(prompts, replace(SAMPLING, step=step))
            ids.append(rollouts.observations[0].id)
            assert generator.sessions[ids[-1]].reward().result(60).value == 0
        first = generator.sessions[ids[0]]
        (other,) = generator.generate(prompts_for("llama")[1:2], replace(SAMPLING, n=1)).observations
        assert generator.sessions[other.id] is not first and generator.sessions[ids[2]] is first
        generator.generate(prompts_for("llama")[1:2], replace(SAMPLING, n=1))
        with pytest.raises(KeyError):
            generator.sessions[ids[2]]
