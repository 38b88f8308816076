"""Small builders for records; builders of fakes are named `fake_*`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mtrl.algorithms.losses import loss_weights
from mtrl.types import (
    Credit,
    EnvironmentTurn,
    Experience,
    LossWeights,
    Medium,
    Observations,
    Prompt,
    Rewards,
    Rollouts,
    Signals,
    Task,
    TrainBatch,
)

NAN = float("nan")
INF = float("inf")


def close(actual: Tensor, expected: Sequence | Tensor, rtol: float = 1e-6, atol: float = 1e-7) -> None:
    """Asserts equality with numbers computed by hand, up to float32 rounding; NaN equals NaN."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.detach().double(), expected, rtol=rtol, atol=atol, equal_nan=True)


def cpu_seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """CPU time of a call. Compare it with that of another call, not with a number of seconds."""
    begin = time.process_time()
    function(*arguments)
    return time.process_time() - begin


def is_alive(pid: int) -> bool:
    """Whether a process runs; zombies count as dead, and so does one that ends between opening and reading."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def same(actual: Tensor, expected: Tensor) -> None:
    """Asserts bitwise equality; NaN equals NaN."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def make_mask(*lengths: int, width: int | None = None) -> Tensor:
    """[N, T] bool, right-padded: make_mask(1, 3) is [[1, 0, 0], [1, 1, 1]]."""
    width = max(lengths) if width is None else width
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def padded(rows: Sequence[Sequence[float]], fill: float = 0.0, width: int | None = None) -> Tensor:
    """Ragged rows as a right-padded [N, T] tensor."""
    width = max(map(len, rows)) if width is None else width
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])


def fake_prompt(name: str, visual: bool = True, text_tokens: int = 2, vision_tokens: int = 4) -> Prompt:
    """A prompt without pixels: one unused token, then the vision pool, then the text pool."""
    media = (Medium("image", "fake.png"),) if visual else ()
    pool = torch.tensor([0] + [2] * (vision_tokens if visual else 0) + [1] * text_tokens)
    task = Task(name, f"fake {name}", ({"role": "user", "content": "fake"},), media=media)
    return Prompt(task, (), ids=torch.arange(len(pool)), engine_ids=torch.arange(len(pool)), token_pool=pool)


def fake_rollouts(
    lengths: Sequence[int],
    group: Sequence[int] | None = None,
    visual: Sequence[bool] | None = None,
    truncated: Sequence[bool] | None = None,
    width: int | None = None,
) -> Rollouts:
    """Rows with distinct tokens, text and version: row i has the tokens 100 * i + t."""
    rows = len(lengths)
    group = [0] * rows if group is None else group
    visual = [True] * (max(group) + 1) if visual is None else visual
    mask = make_mask(*lengths, width=width)
    return Rollouts(
        prompts=tuple(fake_prompt(f"p{i}", seen) for i, seen in enumerate(visual)),
        group=torch.tensor(group),
        tokens=(100 * torch.arange(rows)[:, None] + torch.arange(mask.shape[1])).where(mask, 0),
        mask=mask,
        rollout_logprobs=torch.zeros(mask.shape),
        text=tuple(f"row {i}" for i in range(rows)),
        finish_reason=tuple("length" if cut else "stop" for cut in truncated or [False] * rows),
        version=torch.arange(rows),
    )


def fake_turn(after: int, text: str, *images: np.ndarray, **facts: Any) -> EnvironmentTurn:
    """A message of an environment of two text tokens, and four for each image."""
    content = [{"type": "text", "text": text}, *({"type": "image"} for _ in images)]
    encoded = fake_prompt("message", bool(images), vision_tokens=4 * len(images))
    task = replace(encoded.task, messages=({"role": "tool", "content": content},))
    return EnvironmentTurn(after, replace(encoded, task=task, media=images), **facts)


def with_turns(experience: Experience, *turns: Sequence[EnvironmentTurn] | None) -> Experience:
    """The experience with these messages of an environment during its responses; None: a row without any record."""
    observations = tuple(None if each is None else Observations(f"o{i}", tuple(each)) for i, each in enumerate(turns))
    return replace(experience, rollouts=replace(experience.rollouts, observations=observations))


def fake_batch(
    rollouts: Rollouts,
    old: Tensor,
    advantage: Tensor,
    weights: LossWeights | None = None,
    correction: Tensor | None = None,
    reference: Tensor | None = None,
) -> TrainBatch:
    """A batch whose weights default to the plain token mean, with no correction."""
    mask = rollouts.mask
    if weights is None:
        weights = loss_weights(mask.float(), mask, "dapo", mask.shape[1])
    if correction is None:
        correction = torch.ones(mask.shape)
    return TrainBatch(rollouts, old, advantage, correction, weights, reference)


def fake_experience(
    rollouts: Rollouts,
    signals: Signals | None = None,
    advantage: Tensor | None = None,
    rewards: Rewards | None = None,
    token_weights: Tensor | None = None,
    credit: Credit | None = None,
) -> Experience:
    """The experience of a step. Rewards default to 0 without parts; `token_weights` are added to the rewards."""
    if rewards is None:
        rewards = Rewards(torch.zeros(len(rollouts)), {}, torch.zeros(len(rollouts), dtype=torch.bool))
    if token_weights is not None:
        rewards = replace(rewards, token_weights=token_weights)
    return Experience(rollouts, rewards, signals or Signals(), advantage, credit=credit)


def slow_but(values, *quick):
    """Parameters of a test; all but the `quick` ones are left to `make test-all`."""
    return [pytest.param(each, marks=() if each in quick else pytest.mark.slow) for each in values]


def random_cases(check):
    """A test of `check(dice)` for 300 random generators, in ten parts."""

    @pytest.mark.parametrize("part", range(10))
    def run(part):
        for seed in range(30 * part, 30 * part + 30):
            try:
                check(np.random.default_rng(seed))
            except AssertionError as error:
                raise AssertionError(f"case {seed}") from error

    return run


class GivenWeights(Mapping):
    """Weights by name as a trainer gives them to an engine; subclasses watch how they are read."""

    def __init__(self, weights):
        self.weights = weights

    def __getitem__(self, name):
        return self.weights[name]

    def form(self, name):
        return self.weights[name].dtype, tuple(self.weights[name].shape)

    def __iter__(self):
        return iter(self.weights)

    def __len__(self):
        return len(self.weights)
