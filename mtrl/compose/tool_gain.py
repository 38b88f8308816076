"""What the tools of an environment are worth: the same questions with them, without them, and with blank images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from mtrl.algorithms.groups import group_mean
from mtrl.algorithms.metrics import success_part
from mtrl.compose.policy import LoadedModel, build_policy
from mtrl.compose.run import evaluate
from mtrl.compose.task_source import Rows
from mtrl.config import Config, ConfigError
from mtrl.environments.tool_calls import CLOSE
from mtrl.training.validation import OnBatch
from mtrl.types import Rewards, Rollouts


@dataclass(frozen=True)
class ToolGain:
    """Means over the questions; gain - harm = with_tools - without. If each has one response, 70 of 100 right with
    tools and 40 without, of which 5 are wrong with them, `gain` is 0.35 and `harm` 0.05. Of several responses these are
    means over pairs of one with tools and one without.
    """

    questions: int
    with_tools: float  # accuracy
    without: float  # prompts describe no tools, and no call is answered
    blank: float  # every image that a tool shows is grey
    gain: float  # right with tools and wrong without
    harm: float  # wrong with tools and right without
    calls: float  # per response, with tools
    errors: float  # share of these calls
    unanswered: float  # responses without tools that call one all the same, and so have no answer


@dataclass
class Answers:
    """How often each question was answered correctly, and what responses did besides."""

    rates: dict[str, float] = field(default_factory=dict)
    calls: list[bool] = field(default_factory=list)  # by response: it ends with a call
    metrics: Mapping[str, float] = field(default_factory=dict)

    @contextmanager
    def watch(self, prompts: int) -> Iterator[OnBatch]:
        yield self.add

    def add(self, rollouts: Rollouts, rewards: Rewards) -> None:
        part = success_part(rewards.parts)
        if part is None:
            raise ConfigError(["worker.reward.functions: none says whether an answer is correct; add accuracy"])
        right = (part >= 1).float().where(~part.isnan(), torch.nan)
        rates = group_mean(right, rollouts.group).tolist()
        self.rates |= {prompt.task.id: rate for prompt, rate in zip(rollouts.prompts, rates, strict=True)}
        self.calls += [text.rstrip().endswith(CLOSE) for text in rollouts.text]


def measure_tool_gain(config: Config, val_data: Rows | None = None) -> ToolGain:
    """Sampled as in validation. `val_data` replaces the validation data."""
    if config.worker.rollout.environment is None:
        raise ConfigError(["worker.rollout.environment: null; the run has no tools whose worth could be measured"])
    loaded = LoadedModel(*build_policy(config))
    plain = replace(config, worker=replace(config.worker, rollout=replace(config.worker.rollout, environment=None)))

    def answer(config: Config, blank_tools: bool = False) -> Answers:
        answers = Answers()
        result = evaluate(config, answers.watch, val_data=val_data, loaded=loaded, blank_tools=blank_tools)
        answers.metrics = result.metrics
        return answers

    return compare(answer(config), answer(plain), answer(config, blank_tools=True))


def compare(tools: Answers, without: Answers, blank: Answers) -> ToolGain:
    shared = [id for id, rate in tools.rates.items() if rate == rate and without.rates.get(id, torch.nan) >= 0]
    a, b, c = (torch.tensor([each.rates[id] for id in shared], dtype=torch.float64) for each in (tools, without, blank))
    return ToolGain(
        questions=len(shared),
        with_tools=float(a.mean()),
        without=float(b.mean()),
        blank=float(c.mean()),
        gain=float((a * (1 - b)).mean()),
        harm=float((b * (1 - a)).mean()),
        calls=tools.metrics["val/tools/calls"],
        errors=tools.metrics.get("val/tools/failure_frequency", 0.0),
        unanswered=sum(without.calls) / len(without.calls),
    )
