"""Built-in rewards. Each takes a sample (see `samples.py`) and returns a number, or None if it does not apply."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mtrl.algorithms.rewards import soft_overlong
from mtrl.rewards.choices import find_choices, normalize_text, split_answer
from mtrl.rewards.truths import is_absent, row_truth, truth_text

Sample = Mapping[str, Any]

THINK_THEN_ANSWER = re.compile(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL)
LEADING_THOUGHT = re.compile(r"\s*<think>.*?</think>\s*\S", re.DOTALL)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def accuracy(sample: Sample) -> float | None:
    """1 if the response chooses exactly the right options; a truth that is not an option is compared as text."""
    truth, right = row_truth(sample["ground_truth"], sample)
    if is_absent(truth):
        return None
    if right:
        return float(find_choices(sample["response"], sample.get("options")) == right)
    text, answer = split_answer(sample["response"])
    return float(normalize_text(text if answer is None else answer) == normalize_text(truth_text(truth)))


def format(sample: Sample) -> float:
    """1 if the whole text is <think>..</think> then <answer>..</answer>, once each."""
    text = sample["response"]
    once = all(text.count(tag) == 1 for tag in TAGS)
    return float(once and THINK_THEN_ANSWER.fullmatch(text) is not None)


def think_format(sample: Sample) -> float:
    """1 if a leading <think>..</think> is followed by some answer."""
    text = sample["response"]
    once = text.count("<think>") == text.count("</think>") == 1
    return float(once and LEADING_THOUGHT.match(text) is not None)


def length(limit: int, cache: int) -> Callable[[Sample], float]:
    """Soft overlong punishment: 0 up to limit - cache tokens, then linear to -1 at the limit."""

    def punish(sample: Sample) -> float:
        return float(soft_overlong(torch.tensor(len(sample["response_token_ids"])), limit, cache))

    return punish
