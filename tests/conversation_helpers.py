"""Conversations of tiny models with a tool that every turn calls."""

import copy
from collections import Counter
from contextlib import closing, contextmanager

import pytest
from tiny_models import TEXT_FAMILIES, get_encoder, shared_backbone

from mtrl.environments.pool import EnvironmentPool
from mtrl.environments.records import EnvironmentLimits, ToolCall
from mtrl.environments.sessions import Sessions
from mtrl.models.forward import Forward
from mtrl.rollout import conversations
from mtrl.rollout.conversations import ConversationGenerator
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Sampling

LOOK = """
import random, time
import numpy as np
from PIL import Image

class Words:
    greeting = None

    def reset(self, **row):
        self.calls = 0
        return self.greeting

    def look(self, wait: float = 0.0) -> str:
        \"\"\"Looks.

        Args:
            wait: Seconds.
        \"\"\"
        time.sleep(wait)
        self.calls += 1
        return f"look {self.calls} {random.random():.3f}"

    def get_reward(self):
        return self.calls / 10

class Pictures(Words):
    def look(self, wait: float = 0.0) -> list:
        \"\"\"Looks.

        Args:
            wait: Seconds.
        \"\"\"
        text = super().look(wait)
        if self.calls == 2:
            raise ValueError("nothing to see")
        noise = np.random.randint(0, 256, (60, 90, 3)).astype(np.uint8)
        return [{"type": "text", "text": text}, {"type": "image", "image": Image.fromarray(noise)}]

class Greets(Pictures):
    greeting = [{"type": "text", "text": "look here"},
                {"type": "image", "image": Image.fromarray(np.full((56, 56, 3), 90, np.uint8))}]

class Strips(Words):
    def look(self) -> list:
        \"\"\"Shows a line of pixels.\"\"\"
        return [{"type": "image", "image": Image.new("RGB", (900, 1))}]

class Draws(Words):
    def reset(self, seed=None, **row):
        super().reset()
        return f"{random.random()} {seed}"

class Differs(Words):
    numbers = iter(range(100))

    def reset(self, **row):
        super().reset()
        return f"{next(self.numbers)}"
"""
SAMPLING = Sampling(n=3, max_new_tokens=300, seed=5, step=2)


def stopping_encoder(family):
    """Random models write no end of turn, so many tokens end one."""
    encoder = copy.copy(get_encoder(family))
    encoder.stop_ids = tuple(range(20, 220))
    return encoder


@pytest.fixture
def calls(monkeypatch):
    """Every turn calls a tool, whatever a random model has written."""
    monkeypatch.setattr(conversations, "parse_tool_calls", lambda text, schemas: [ToolCall("look", {})])


@contextmanager
def conversing(folder, family, engine=None, name=None, max_turns=3, **limits):
    """`engine` makes one from the family and the encoder."""
    file = folder / "look.py"
    file.write_text(LOOK)
    encoder = stopping_encoder(family)
    name = name or ("Words" if family in TEXT_FAMILIES else "Pictures")
    with closing(EnvironmentPool(f"{file}:{name}", EnvironmentLimits(**limits), workers=2)) as pool:
        sampler = engine(family, encoder) if engine else LocalGenerator(shared_backbone(family), encoder)
        yield ConversationGenerator(sampler, encoder, pool, Sessions(), lambda prompt: {}, max_turns)


def check_log_probs(rollouts, family, tolerance):
    """The trainer's are those of the engine, and the conversations have turns, images and errors."""
    trainer = Forward(shared_backbone(family), get_encoder(family))
    gap = (trainer.signals(rollouts).old_logprobs - rollouts.rollout_logprobs)[rollouts.mask].abs().max()
    assert gap < tolerance
    turns = Counter(len(each.turns) for each in rollouts.observations)
    assert turns[3] > 3, turns
    own = rollouts.mask.sum(1)
    for row, each in enumerate(rollouts.observations):
        assert all(0 < turn.after <= own[row] for turn in each.turns)
        assert all(int(rollouts.tokens[row, turn.after - 1]) in range(20, 220) for turn in each.turns)
        images = [len(turn.message.media) for turn in each.turns]
        assert family in TEXT_FAMILIES or images == [1, 0, 1][: len(images)], "the second look fails"
        assert [turn.errors for turn in each.turns] == [int(not n and family not in TEXT_FAMILIES) for n in images]
