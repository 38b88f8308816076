"""A response may be a third of a megabyte of anything: the built-in rewards read it in linear time, or in a sandbox."""

from importlib.util import find_spec

import pytest
from helpers import cpu_seconds
from reward_helpers import rows

from mtrl.compose.reward_scorer import build_scorer
from mtrl.config import load_config
from mtrl.rewards.builtin import accuracy, format, think_format
from mtrl.rewards.builtin_names import REWARDS

SIZE = 300_000
SOON = 300  # times as long as a loop over the text: linear time takes 30 at most, quadratic time 3,000 and more
COLOURS = ["red", "green", "blue", "a red circle"]
UNITS = ["\n", " ", "<think>", "</think>", "<answer>", "</answer>", "<think></think>", "answer:", "answer ", "答案是"]
UNITS += ["(", "[[", "{", "A", "A ", "a ", "A, ", "A or ", "not A ", "A is wrong. ", "because ", "option b ", "Ａ"]
UNITS += ["not A, B. ", "A or B? ", "A, no, ", "I see A cat "]
UNITS += ["\u0301\u0316", "\\boxed{", "\\boxed{1}", "\\", "\\(", "$"]  # the first: Unicode's normal form is quadratic


def hostile(unit):
    return (unit * (SIZE // len(unit) + 1))[:SIZE]


def relative_time(function, *arguments):
    """CPU time in units of a loop over the longest text."""
    return cpu_seconds(function, *arguments) / cpu_seconds(lambda: [None for _ in hostile(" ")])


@pytest.mark.parametrize("unit", UNITS)
def test_a_huge_response_is_read_in_linear_time(unit):
    text = hostile(unit)
    for response in (text, "<answer>" + text):
        assert relative_time(accuracy, {"response": response, "ground_truth": "B", "options": COLOURS}) < SOON
    assert relative_time(accuracy, {"response": text, "ground_truth": "some text"}) < SOON
    for form in (format, think_format):
        assert relative_time(form, {"response": f"<think>{text}</think>"}) < SOON


@pytest.mark.parametrize("unit", UNITS)
def test_the_formula_in_a_huge_response_is_found_in_linear_time(unit):
    pytest.importorskip("math_verify")
    from mtrl.rewards.math_equality import extract_answer, extract_last_box, has_formula

    text = hostile(unit)
    for function in (extract_answer, has_formula):
        assert relative_time(function, text) < SOON
    assert relative_time(extract_last_box, text[: SIZE // 2] + "}" * (SIZE // 2)) < SOON


def test_the_result_does_not_depend_on_the_length():
    padding = "\n" * SIZE
    assert accuracy({"response": "B" + padding, "ground_truth": "B"}) == 1
    assert accuracy({"response": padding + "Answer: B, not A", "ground_truth": "B"}) == 1
    assert accuracy({"response": "<answer>" + padding + "B</answer>" + padding, "ground_truth": "B"}) == 1


# ------------------------------------------------------------------------------------------------------ the time limit
DEEP = {
    "a tower of powers": "9**9**9**9", "a tower in LaTeX": "9^{9^{9^{9^{9}}}}+1", "factorials": "((9!)!)!",
    "brackets": "(" * 20_000 + "1" + ")" * 20_000, "fractions": r"\frac{1}{" * 5_000 + "2" + "}" * 5_000,
    "roots": r"\sqrt{" * 5_000 + "2" + "}" * 5_000, "a long sum": "+".join(["x"] * 50_000), "digits": "7" * SIZE,
    "a wide set": r"\{" + ",".join(map(str, range(20_000))) + r"\}", "an integral": r"\int_0^1 x^{x^{x^x}} dx",
}  # fmt: skip
LIMIT_SECONDS = 2.0


@pytest.mark.slow
@pytest.mark.skipif(find_spec("math_verify") is None, reason="needs math-verify")
def test_no_answer_keeps_math_longer_than_its_limit():
    """Sequential calls in one worker; starting the next worker takes time too."""
    limits = {"worker.reward.timeout_s": LIMIT_SECONDS, "worker.reward.num_cpus": 1}
    scorer = build_scorer(load_config(None, {"worker.reward.functions": ("math",), **limits}), steps=1)
    texts = [rf"\boxed{{{answer}}}" for answer in (*DEEP.values(), *map(hostile, UNITS[::5]), "0.5")]
    found = [scorer.submit(rows([text], ["0.5"]), step=None).result() for text in texts]
    assert found[-1].parts["math"].tolist() == [1.0]
    assert all(rewards.parts["math"].tolist() == [0.0] for rewards in found[:-1])
    scorer.close()


def test_every_builtin_reads_in_linear_time_or_has_the_sandbox():
    """A new one belongs to one of these."""
    linear = {"accuracy", "format", "think_format"}  # above
    constant = {"length", "mdi", "vgr"}  # they use only numbers
    as_accuracy = {"vgr_hard_negative"}
    sandboxed = {name for name, reward in REWARDS.items() if reward.sandboxed}
    assert sandboxed == {"math"} and set(REWARDS) == linear | constant | as_accuracy | sandboxed
