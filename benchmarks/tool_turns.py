"""Conversations with a slow tool: whoever is ready continues, against a barrier after every turn.

    python -m benchmarks.tool_turns [--conversations 64] [--turns 4] [--slowest 2.0] [--tokens 24] [--out FILE]

The embedded model samples; after each turn a tool is called, whatever the model wrote, which takes from 0.1 to
`--slowest` seconds, the same in both measurements: first with a barrier (all wait for the slowest tool of a turn, as in
TRL's loop), then as `mtrl train` does. Every response has all turns. The last line is one JSON object: seconds of both,
and the floor, the longest sum of one response's tools.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import finish
from mtrl.embedded.task import make_question
from mtrl.environments.pool import EnvironmentPool
from mtrl.environments.records import EnvironmentLimits, ToolCall
from mtrl.environments.sessions import Sessions
from mtrl.models.backbone import Backbone
from mtrl.models.families import load_encoder
from mtrl.models.load_model import load_model
from mtrl.rollout import conversations
from mtrl.rollout.conversations import Conversation, ConversationGenerator
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Rollouts, Sampling
from mtrl.utils.embedded_models import MODELS
from pretraining.evaluation import make_prompts

TOOL = '''
import asyncio, random

class Slow:
    def reset(self, **row): ...

    async def look(self, slowest: float) -> str:
        """Waits.

        Args:
            slowest: How long at most.
        """
        await asyncio.sleep(random.uniform(0.1, slowest))  # keyed by the response and its turn
        return "done"
'''


def wait_for_all(responses: Sequence[Conversation]) -> list[Conversation]:
    wait([future for each in responses for future in each.results])
    return list(responses)


def measure(a: argparse.Namespace, pool: EnvironmentPool, waiting: Callable[..., Any]) -> tuple[float, Rollouts]:
    encoder = load_encoder(MODELS["zoo"])
    encoder.stop_ids = tuple(range(len(encoder.tokenizer)))  # any token ends a turn
    generator = ConversationGenerator(
        LocalGenerator(Backbone(load_model(MODELS["zoo"])), encoder),
        encoder,
        pool,
        Sessions(),
        lambda prompt: {},
        a.turns,
    )
    prompts = make_prompts([make_question("train", index) for index in range(a.conversations)], encoder)
    conversations.parse_tool_calls = lambda text, schemas: [ToolCall("look", {"slowest": a.slowest})]
    conversations.wait_for_some = waiting
    begin = time.monotonic()
    rollouts = generator.generate(prompts, Sampling(n=1, max_new_tokens=a.tokens * (a.turns + 1)))
    return time.monotonic() - begin, rollouts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--slowest", type=float, default=2.0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    own = conversations.wait_for_some
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "slow.py"
        file.write_text(TOOL)
        for name, waiting in (("barrier", wait_for_all), ("ready", own)):
            with closing(EnvironmentPool(f"{file}:Slow", EnvironmentLimits(turns=a.turns), workers=2)) as pool:
                seconds[name], rollouts = measure(a, pool, waiting)
            assert all(len(each.turns) == a.turns for each in rollouts.observed if each is not None)
            waited = [sum(turn.waited for turn in each.turns) for each in rollouts.observed if each is not None]
    result = {
        "seconds": {k: round(v, 2) for k, v in seconds.items()},
        "slowest response's tools": round(max(waited), 2),
    }
    arguments = {name: value for name, value in vars(a).items() if name != "out"}
    finish({"bench": "tool_turns", "args": arguments, "threads": torch.get_num_threads(), **result}, a.out)


if __name__ == "__main__":
    main()
