"""One rule, four signatures, sync and async, in this process and in the sandbox: the same rewards."""

import asyncio
import functools
from pathlib import Path

import numpy as np
import pytest
from helpers import NAN, close
from reward_helpers import measured, rows, scored

from mtrl.compose.reward_scorer import build_scorer
from mtrl.config import load_config
from mtrl.rewards.outcomes import read_outcome
from mtrl.rewards.sandbox import InProcess, Sandbox, split_calls
from mtrl.rewards.signatures import Traits, UserReward, detect_signature
from mtrl.types import Signals


def write_source(tmp_path, source, name=None):
    path = tmp_path / "mine.py"
    path.write_text(source)
    return f"{path}:{name}" if name else str(path)


# ------------------------------------------------------------------------------------------------------- the same rule
TEXTS = ("<answer>red</answer>", "it is red", "<answer>blue</answer>", "it is blue", "<answer> Blue </answer>", "")
ANSWERS = ("red", "red", "red", "red", "blue", "blue")


def rate(text, truth):
    return len(text) + (1.0 if truth == "red" else 0.0)


RULES = """
def rate(text, truth): return len(text) + (1.0 if truth == "red" else 0.0)
{extra}
{define} ours(data): return rate(data["response"], data["ground_truth"])
{define} trl(completions, ground_truth, **kwargs): return [rate(c, g) for c, g in zip(completions, ground_truth)]
{define} one(reward_input): return {{"overall": rate(reward_input["response"], reward_input["ground_truth"])}}
{define} many(reward_inputs): return [{{"overall": rate(x["response"], x["ground_truth"])}} for x in reward_inputs]
{define} verl(data_source, solution_str, ground_truth, extra_info=None): return rate(solution_str, ground_truth)
"""


@pytest.mark.parametrize("name", ["ours", "trl", "one", "many", "verl"])
@pytest.mark.parametrize("define", ["def", "async def"])
def test_every_signature_sync_and_async_by_file_and_as_an_object(tmp_path, name, define):
    source = RULES.format(define=define, extra="")
    rollouts, expected = rows(TEXTS, ANSWERS), [rate(text, truth) for text, truth in zip(TEXTS, ANSWERS, strict=True)]
    space = {}
    exec(source, space)
    close(scored(space[name], rollouts).total, expected)
    close(scored(write_source(tmp_path, source, name), rollouts).total, expected)


# ---------------------------------------------------------------------------------- written as in their documentation
def by_characters(completions, **kwargs):
    """TRL: standard prompts, where a completion is a text."""
    return [float(len(completion)) for completion in completions]


def by_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def by_format(completions, **kwargs):
    """TRL: conversational prompts, where a completion is a list of messages."""
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if content.startswith("<answer>") else 0.0 for content in contents]


def for_one_task(prompts, completions, task, **kwargs):
    """TRL: several tasks in one dataset; None where the reward does not apply."""
    return [float("red" in text) if kind == "colour" else None for text, kind in zip(completions, task, strict=True)]


@pytest.mark.parametrize("chat", [False, True])
def test_trl_functions_for_texts_and_for_chats(chat):
    rollouts = rows(TEXTS[:2], ANSWERS[:2], chat=chat)
    close(scored(by_tokens, rollouts).total, [2, 3])
    close(scored(by_format, rollouts).total, [1, 0])
    # As in TRL, len() of a completion is the number of its messages where rows are chats.
    close(scored(by_characters, rollouts).total, [1, 1] if chat else [20, 9])


def test_trl_gets_the_prompt_in_the_form_of_its_row():
    seen = []

    def look(prompts, completions, **kwargs):
        seen.append((prompts, completions))
        return [0.0] * len(prompts)

    scored(look, rows(["yes"], ["x"]))
    scored(look, rows(["yes"], ["x"], chat=True))
    assert seen[0] == (["question 0"], ["yes"])
    asked, said = {"role": "user", "content": "question 0"}, {"role": "assistant", "content": "yes"}
    assert seen[1] == ([[asked]], [[said]])


def test_trl_functions_for_several_tasks():
    rollouts = rows(["a red one", "a red one", "blue"], ["x"] * 3, task=["colour", "shape", "colour"])
    rewards = scored(for_one_task, rollouts)
    close(rewards.parts["for_one_task"], [1, NAN, 0])


def test_trl_functions_get_all_documented_arguments():
    def curious(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, answer, level, images):
        log_extra("seen", [len(ids) for ids in completion_ids])
        log_metric("constant", 7)
        assert answer == ["x", "y"] and level == [3, 4] and images == [[], []]
        return [float(trainer_state.global_step)] * 2

    rewards = scored(curious, rows(["a", "b"], ["x", "y"], level=[3, 4]), step=4)
    close(rewards.total, [4, 4])
    close(rewards.parts["seen"], [2, 3])
    close(rewards.parts["constant"], [7, 7])


def test_trls_own_function_runs_from_its_own_file():
    trl = pytest.importorskip("trl", reason="TRL is a development dependency")
    path = Path(trl.__file__).parent / "rewards/format_rewards.py"
    texts = ["<think>so</think> red", "red", "<think>so red"]
    close(scored(f"{path}:think_format_reward", rows(texts, ["x"] * 3)).total, [1, 0, 0])


def easyr1_sequential(reward_input, format_weight=0.1):
    """EasyR1: one dict with response, response_length and ground_truth; weights by keyword."""
    if not isinstance(reward_input, dict):
        raise ValueError("one at a time")
    accuracy, form = (
        float(reward_input["ground_truth"] in reward_input["response"]),
        float("<" in reward_input["response"]),
    )
    return {"overall": (1 - format_weight) * accuracy + format_weight * form, "format": form, "accuracy": accuracy}


def test_easyr1_parts_are_logged_and_kwargs_reach_it():
    rewards = scored(easyr1_sequential, rows(TEXTS[:4], ANSWERS[:4]), reward_fn_kwargs={"format_weight": 0.25})
    close(rewards.total, [1, 0.75, 0.25, 0])
    close(rewards.parts["accuracy"], [1, 1, 0, 0])
    assert "overall" not in rewards.parts


def test_easyr1_by_its_mark_alone(tmp_path):
    source = "REWARD_NAME = 'marked'\nREWARD_TYPE = '{}'\ndef compute_score(given): return {}\n"
    each = "[{'overall': x['response_length']} for x in given]"
    close(
        scored(write_source(tmp_path, source.format("batch", each)), rows(["a", "b"], ["x"] * 2)).parts["marked"],
        [2, 3],
    )
    alone = "{'overall': given['response_length']}"
    close(scored(write_source(tmp_path, source.format("sequential", alone)), rows(["a", "b"], ["x"] * 2)).total, [2, 3])


def test_verl_gets_the_columns_as_extra_info():
    def score(data_source, solution_str, ground_truth, extra_info=None):
        assert extra_info["level"] == 2 and extra_info["index"] == 5 and extra_info["split"] == "train"
        return float(data_source == "openai/gsm8k" and solution_str == "42" and ground_truth == "42")

    columns = {"level": [2], "extra_info": [{"index": 5, "split": "train"}], "data_source": ["openai/gsm8k"]}
    rewards = scored(score, rows(["42"], ["42"], **columns))
    assert not rewards.failed.any()
    close(rewards.total, [1])


@pytest.mark.parametrize(
    ("names", "reward_type", "signature"),
    [
        (["data"], None, "mtrl"),
        (["sample", "signals"], None, "mtrl"),
        ([], None, "mtrl"),
        (["prompts", "completions", "kwargs"], None, "trl"),
        (["completion_ids", "kwargs"], None, "trl"),
        (["completions", "solution_str"], "batch", "trl"),
        (["data_source", "solution_str", "ground_truth", "extra_info"], None, "verl"),
        (["solution_str", "ground_truth"], "batch", "verl"),
        (["reward_input", "weight"], None, "easyr1"),
        (["reward_inputs"], None, "easyr1_batch"),
        (["reward_inputs"], "sequential", "easyr1"),
        (["anything"], "batch", "easyr1_batch"),
    ],
)
def test_the_parameters_decide(names, reward_type, signature):
    assert detect_signature(names, reward_type) == signature


# ----------------------------------------------------------------------------------------------------- calls for many
def test_a_function_of_many_sees_groups_whole():
    many = Traits(batch=True, concurrent=False, signals=False)
    group = [0] * 40 + [1] * 40 + [2] * 24 + [3] * 100 + [4]
    calls = split_calls(many, group, workers=4)
    assert sorted(row for rows in calls for row in rows) == list(range(205))
    assert [len(rows) for rows in calls] == [40, 64, 100, 1]
    for g in range(5):
        assert sum(any(group[row] == g for row in rows) for rows in calls) == 1


def test_single_calls_travel_in_messages_that_become_small():
    one = Traits(batch=False, concurrent=False, signals=False)
    sizes = [len(rows) for rows in split_calls(one, range(64), workers=4)]
    assert sizes[:8] == [8, 7, 7, 6, 5, 4, 4, 3] and sizes[-8:] == [1] * 8
    calls = split_calls(one, range(4096), workers=4)
    assert [row for rows in calls for row in rows] == list(range(4096)) and max(map(len, calls)) == 128
    assert split_calls(one, [], workers=4) == []


def test_a_call_for_many_that_fails_fails_whole_and_alone(tmp_path, caplog):
    """Two calls of two groups each: one whose group 1 is bad, and one without bad groups."""
    source = (
        "import os\n"
        "def f(completions, **kwargs):\n"
        "    if 'raise' in completions: raise RuntimeError('bad batch')\n"
        "    if 'quit' in completions: os._exit(3)\n"
        "    if 'short' in completions: return [1.0]\n"
        "    if 'nothing' in completions: return None\n"
        "    return [float('nan') if text == 'nan' else 1.0 for text in completions]\n"
    )
    spec, group = write_source(tmp_path, source, "f"), [0] * 40 + [1] * 40
    sandbox = Sandbox(spec, {}, workers=1, timeout_s=20)
    for bad, cause in [
        ("raise", "bad batch"),
        ("quit", "ended with status 3"),
        ("short", "it returned 1 rewards for 40 responses"),
        ("nothing", "returns a list; it returned NoneType"),
    ]:
        samples = [{"response": "fine"}] * 79 + [{"response": bad}]
        found = [each.result(timeout=60) for each in sandbox.submit(samples, group)]
        assert [each.value for each in found[:40]] == [1.0] * 40
        assert all(cause in each.failure for each in found[40:])
    found = [each.result(timeout=60) for each in sandbox.submit([{"response": "nan"}, {"response": "fine"}], [0, 0])]
    assert "must be finite" in found[0].failure and found[1].value == 1.0  # the others of its call have their numbers
    sandbox.close()


# -------------------------------------------------------------------------------------------------------------- async
@pytest.mark.slow  # 4 s
def test_async_calls_run_together_and_each_has_its_time(tmp_path):
    source = (
        "import asyncio, os\n"
        "running = []\n"
        "async def f(data):\n"
        "    running.append(data)\n"
        "    await asyncio.sleep(1000 if data['response'] == 'hang' else 0.3)\n"
        "    if data['response'] == 'quit': os._exit(3)\n"
        "    together = len(running)\n"
        "    running.remove(data)\n"
        "    return 1.0, {'together': together}\n"
    )
    sandbox = Sandbox(write_source(tmp_path, source, "f"), {}, workers=1, timeout_s=1.0)
    found = [each.result(timeout=60) for each in sandbox.submit([{"response": "x"}] * 20)]
    assert [each.value for each in found] == [1.0] * 20
    assert max(each.extras["together"] for each in found) >= 5
    found = [each.result(timeout=60) for each in sandbox.submit([{"response": x} for x in ("x", "hang", "y")])]
    assert [each.failure for each in found] == [None, "took longer than 1 s", None]
    found = [each.result(timeout=60) for each in sandbox.submit([{"response": x} for x in ("x", "quit", "y")])]
    assert [each.value for each in found] == [1.0, None, 1.0] and "status 3" in found[1].failure
    sandbox.close()


def test_async_in_a_process_that_runs_a_loop_already():
    """A notebook does."""

    async def f(data):
        await asyncio.sleep(0)
        return 2.0

    async def notebook():
        return scored(f, rows(["a"], ["x"]))

    close(asyncio.run(notebook()).total, [2])


def test_a_wrapper_that_hides_an_async_function():
    async def hidden(data):
        return 3.0

    close(scored(lambda data: hidden(data), rows(["a"], ["x"])).total, [3])


# ------------------------------------------------------------------------------------------------------------ signals
@pytest.mark.parametrize(
    "function",
    [
        lambda data, signals: -sum(signals["old_logprobs"]),
        lambda data: -sum(data["signals"]["old_logprobs"]),
        lambda completions, signals, **kwargs: [-sum(each["old_logprobs"]) for each in signals],
        lambda reward_inputs: [{"overall": -sum(each["signals"]["old_logprobs"])} for each in reward_inputs],
        lambda solution_str, extra_info: -sum(extra_info["signals"]["old_logprobs"]),
    ],
)
def test_functions_that_need_signals_get_those_of_their_tokens(function):
    rewards = scored(function, rows(["a", "b"], ["x"] * 2), signals=measured())
    assert not rewards.failed.any()
    close(rewards.total, [3, 12])


def test_signals_are_measured_first_and_others_do_not_wait():
    order = []

    def early(data):
        order.append("early")
        return 1.0

    def late(data, signals):
        order.append(sorted(signals))
        return 2.0

    scorer = build_scorer(load_config(None, {}), 10, [late, early])
    pending = scorer.submit(rows(["a"], ["x"]), 0)
    assert order == ["early"]
    rewards = pending.result(Signals(old_logprobs=measured().old_logprobs[:1], entropy=measured().entropy[:1]))
    assert order == ["early", ["entropy", "old_logprobs"]] and list(rewards.parts) == ["late", "early"]
    close(scorer.submit(rows(["a"], ["x"]), None).result().total, [3])
    assert order[-1] == []  # a validation measures nothing


# ------------------------------------------------------------------------------------------------------------ answers
@pytest.mark.parametrize(
    ("answer", "value", "extras"),
    [
        (1, 1.0, {}),
        (np.float64(0.5), 0.5, {}),
        (None, None, {}),
        ((0.5, {"a": 1}), 0.5, {"a": 1}),
        ((None, {"a": 1}), None, {"a": 1}),
        ({"score": 0.5, "a": 1}, 0.5, {"a": 1}),
        ({"overall": 0.5, "score": 1}, 0.5, {"score": 1}),
        ({"overall": None}, None, {}),
        ((1.0, {"token_weights": np.ones(2)}), 1.0, {"token_weights": [1.0, 1.0]}),
    ],
)
def test_answers(answer, value, extras):
    found = read_outcome(answer)
    assert (found.value, found.extras, found.failure) == (value, extras, None)


def test_a_callable_keeps_its_own_type_error():
    def wrong(completions, **kwargs):
        return [1.0 + None for _ in completions]

    outcome = InProcess(wrong, {}).submit([{"response": "a"}])[0].result()
    assert "unsupported operand" in outcome.failure and "in wrong" in outcome.failure
    assert "rewards/signatures.py" not in outcome.failure  # the user's own code, not the frames before it


def test_objects_that_cannot_be_called_are_errors_before_the_run():
    with pytest.raises(
        ValueError, match=r"\['scale'\] of reward_fn_kwargs: got an unexpected keyword argument 'scale'"
    ):
        UserReward(lambda data: 1.0, {"scale": 2})
    with pytest.raises(ValueError, match="unexpected keyword argument 'scale'"):
        UserReward(lambda completions: [1.0], {"scale": 2})
    UserReward(lambda completions, task: [1.0], {})  # the columns of a row are known when it arrives

    def injects(function):
        return functools.wraps(function)(lambda data: function(data, 3.0))

    assert InProcess(injects(lambda data, bonus: bonus), {}).submit([{"response": ""}])[0].result().value == 3.0


def test_a_call_that_cancels_itself_fails_alone():
    async def gives_up(data):
        if data["response"] == "up":
            raise asyncio.CancelledError
        return 1.0

    found = [each.result(5) for each in InProcess(gives_up, {}).submit([{"response": text} for text in ("up", "on")])]
    assert "CancelledError" in found[0].failure and found[1].value == 1.0


def test_a_function_without_a_readable_signature():
    assert UserReward(max, {}).signature == "mtrl"


def test_a_reward_that_asks_for_the_trainer_is_told_what_it_may_ask_for():
    def by_key(completions, **kwargs):
        return [float(kwargs["trainer"].state.global_step)] * len(completions)

    def by_parameter(completions, trainer, **kwargs):
        return [0.0] * len(completions)

    outcomes = []
    UserReward(by_key, {}).score([{"response": "a"}], lambda index, outcome: outcomes.append(outcome))
    assert "kwargs['trainer'] is never given" in outcomes[0].failure
    assert "trainer_state (global_step, max_steps)" in outcomes[0].failure
    with pytest.raises(ValueError, match=r"its parameter trainer is never given.*trainer_state"):
        UserReward(by_parameter, {})
    UserReward(by_parameter, {"trainer": None})
