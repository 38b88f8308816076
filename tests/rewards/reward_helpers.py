"""Rollouts with given rows and responses for tests of rewards, and rewards as a run computes them."""

from dataclasses import replace
from pathlib import Path

import torch
from helpers import fake_rollouts

from mtrl.compose.reward_scorer import build_scorer
from mtrl.config import load_config
from mtrl.types import Signals

EXAMPLES = Path(__file__).resolve().parents[2] / "examples/rewards"


def rows(texts, answers, group=None, chat=False, pictures=None, **columns):
    """Rollouts with these responses and rows; a column has one value per prompt."""
    group = list(range(len(texts))) if group is None else group
    plain = fake_rollouts([2 + i for i in range(len(texts))], group=group)
    prompts = tuple(
        replace(
            prompt,
            task=replace(
                prompt.task,
                answer=answers[i],
                columns={name: values[i] for name, values in columns.items()},
                messages=({"role": "user", "content": f"question {i}"},),
                chat=chat,
            ),
            media=() if pictures is None or pictures[i] is None else (pictures[i],),
        )
        for i, prompt in enumerate(plain.prompts)
    )
    return replace(plain, prompts=prompts, text=tuple(texts))


def scored(spec, rollouts, step=0, signals=None, **settings):
    """Scores by a file through the config and the sandbox, as in a run, or by a callable in this process."""
    by_file = isinstance(spec, (str, Path))
    overrides = {"worker.reward.num_cpus": 1} | {f"worker.reward.{key}": value for key, value in settings.items()}
    functions = {"worker.reward.functions": (str(spec),)} if by_file else {}
    scorer = build_scorer(load_config(None, overrides | functions), 10, None if by_file else [spec])
    try:
        return scorer.submit(rollouts, step).result(signals)
    finally:
        scorer.close()


def named(tmp_path, source, name="rewards_of_mine.py"):
    path = tmp_path / name
    path.write_text(source)
    return path


def score(spec, **overrides):
    """The functions that a name resolves to, and their rewards for one response, through the scorer as in a run."""
    settings = {"worker.reward.functions": (spec,), "worker.reward.num_cpus": 1}
    scorer = build_scorer(load_config(None, settings | overrides), 10)
    try:
        return list(scorer.functions), scorer.submit(fake_rollouts([1]), 0).result()
    finally:
        scorer.close()


def measured():
    return Signals(
        old_logprobs=torch.tensor([[-1.0, -2.0, 0.0], [-3.0, -4.0, -5.0]]),
        entropy=torch.tensor([[0.5, 0.5, 0.0], [1.0, 2.0, 3.0]]),
        attention_mass=torch.zeros(2, 3, 5, 2),
    )
