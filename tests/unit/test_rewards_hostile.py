"""A response may be a megabyte of anything: the built-in rewards read it in linear time."""

import time

import pytest

from mtrl.rewards.builtin import accuracy, format, think_format

SIZE = 1_000_000
COLOURS = ["red", "green", "blue", "a red circle"]
UNITS = ["\n", " ", "<think>", "</think>", "<answer>", "</answer>", "<think></think>", "answer:", "answer ", "答案是"]
UNITS += ["(", "[[", "{", "A", "A ", "a ", "A, ", "A or ", "not A ", "A is wrong. ", "because ", "option b ", "Ａ"]
UNITS += ["\u0301\u0316", "\\boxed{", "\\boxed{1}", "\\", "\\(", "$"]  # the first: Unicode's normal form is quadratic


def hostile(unit):
    return (unit * (SIZE // len(unit) + 1))[:SIZE]


def seconds(function, *arguments):
    begin = time.process_time()  # of this process alone: other work on the machine does not count
    function(*arguments)
    return time.process_time() - begin


@pytest.mark.parametrize("unit", UNITS)
def test_a_megabyte_takes_less_than_a_second(unit):
    text = hostile(unit)
    for response in (text, "<answer>" + text):
        assert seconds(accuracy, {"response": response, "ground_truth": "B", "options": COLOURS}) < 1
    assert seconds(accuracy, {"response": text, "ground_truth": "some text"}) < 1
    for form in (format, think_format):
        assert seconds(form, {"response": f"<think>{text}</think>"}) < 1


@pytest.mark.parametrize("unit", UNITS)
def test_the_formula_in_a_megabyte_is_found_in_less_than_a_second(unit):
    pytest.importorskip("math_verify")
    from mtrl.rewards.math_equality import given_answer, has_formula, last_box

    text = hostile(unit)
    for function in (given_answer, has_formula):
        assert seconds(function, text) < 1
    assert seconds(last_box, text[: SIZE // 2] + "}" * (SIZE // 2)) < 1


def test_what_is_found_does_not_depend_on_the_length():
    padding = "\n" * SIZE
    assert accuracy({"response": "B" + padding, "ground_truth": "B"}) == 1
    assert accuracy({"response": padding + "Answer: B, not A", "ground_truth": "B"}) == 1
    assert accuracy({"response": "<answer>" + padding + "B</answer>" + padding, "ground_truth": "B"}) == 1
