"""Builds what a run with an environment has besides: its processes, tools in prompts, the generator, rewards."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mtrl.config import Config
from mtrl.data.media import decode, read_size
from mtrl.environments.pool import EnvironmentPool
from mtrl.environments.records import Block, EnvironmentLimits
from mtrl.environments.rewards import EnvironmentFunction, EnvironmentReward
from mtrl.environments.sessions import Sessions
from mtrl.models.families import TextEncoder
from mtrl.protocols import Generator
from mtrl.rewards.builtin_names import is_builtin_name
from mtrl.rewards.samples import prompt_fields
from mtrl.rewards.scorer import RewardScorer
from mtrl.rollout.conversations import ConversationGenerator
from mtrl.types import Prompt
from mtrl.utils.errors import StartError
from mtrl.utils.plugins import split_spec

WANTED = "environments"  # the parameter of reward functions
GREY = 127
NAMES = ("reward_function", "compute_score")  # of a function, if the spec has none


@dataclass
class RunEnvironments:
    """The environments of a run."""

    config: Config
    pool: EnvironmentPool
    functions: tuple[str, ...]  # reward functions that want environments
    sessions: Sessions = field(default_factory=Sessions)

    @classmethod
    def open(cls, config: Config) -> RunEnvironments | None:
        rollout, reward = config.worker.rollout, config.worker.reward
        if rollout.environment is None:
            return None
        named = [each for each in config.reward_functions if not is_builtin_name(each)]
        functions = tuple(each for each in named if takes_environments(each))
        pool = EnvironmentPool(
            rollout.environment,
            EnvironmentLimits(call_seconds=rollout.tool_timeout_s, turns=rollout.max_turns),
            rollout.environment_processes,
            dict.fromkeys(functions, reward.reward_fn_kwargs),
        )
        return cls(config, pool, functions)

    def show_tools(self, encoder: TextEncoder) -> TextEncoder:
        """The encoder of prompts that describe the tools."""
        try:
            encoder.check_messages()
        except ValueError as error:
            raise StartError(f"worker.rollout.environment: {error}") from error
        return encoder.with_tools({name: tools.schemas for name, tools in self.pool.tools.items()})

    def make_row(self, prompt: Prompt) -> dict[str, Any]:
        return environment_row(prompt, self.config.dataset.options_key, self.config.dataset.answer_key)

    def converse(self, engine: Generator, encoder: TextEncoder) -> ConversationGenerator:
        rollout = self.config.worker.rollout
        return ConversationGenerator(
            engine, encoder, self.pool, self.sessions, self.make_row, rollout.max_turns, rollout.tool_barrier
        )

    def add_rewards(self, scorer: RewardScorer) -> None:
        """The classes' own rewards, with weight 1 each as in TRL, after all others; and functions that want the
        environments get them."""
        names = {tools.class_name for tools in self.pool.tools.values() if tools.rewards}
        functions = dict(scorer.functions)
        for name, spec in zip(list(functions), self.config.reward_functions, strict=False):
            if spec in self.functions:
                functions[name].close()
                functions[name] = EnvironmentFunction(self.pool, self.sessions, spec)
        given = len(functions)  # the weight of a reward model follows theirs
        for name in sorted(names):
            functions[name] = EnvironmentReward(self.sessions, name)
        ones = (1.0,) * len(names)
        scorer.functions = functions
        scorer.schedule = [(start, (*weights[:given], *ones, *weights[given:])) for start, weights in scorer.schedule]


def blank_messages(encoder: TextEncoder) -> TextEncoder:
    """A copy to which every image of a message is grey: a control that shows what the images are worth."""

    def encode_message(content: Sequence[Block], after: int, id: str) -> Prompt:
        blank = [block if isinstance(block, str) else np.full_like(block, GREY) for block in content]
        return encoder.encode_message(blank, after, id)

    blind: Any = copy(encoder)
    blind.encode_message = encode_message
    return blind


def environment_row(prompt: Prompt, options: str, answer: str) -> dict[str, Any]:
    """What `reset` gets: the columns, and the images as they are in the data; `image_sizes` are [width, height] each,
    as the model sees them."""
    row = prompt_fields(prompt, options, answer)
    pictures = [medium for medium in prompt.task.media if medium.kind == "image"]
    sizes = [[medium.shape[1], medium.shape[0]] for medium in prompt.media if medium.ndim == 3]
    originals = [Image.fromarray(decode(medium, read_size(medium, verify=False))) for medium in pictures]
    return {**row, answer: prompt.task.answer, "images": originals, "image_sizes": sizes}


def takes_environments(spec: str) -> bool:
    """Whether the reward function has the parameter `environments`. Its file is read, not run."""
    source, name = split_spec(spec)
    if not source.endswith(".py"):
        found = find_spec(source)
        source = found.origin or "" if found else ""
    path = Path(source).expanduser()
    if not path.is_file():
        return False  # loading it gives a better message
    functions = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    chosen = [node for node in functions if node.name == name] or [node for node in functions if node.name in NAMES]
    return any(each.arg == WANTED for node in chosen or functions for each in (*node.args.args, *node.args.kwonlyargs))
