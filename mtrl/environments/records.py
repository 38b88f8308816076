"""The records between the rollouts and their environments, each with a worked example. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Rgb = NDArray[np.uint8]  # [height, width, 3]
Block = str | Rgb  # of a message's content: a text, or an image

ErrorKind = Literal[
    "malformed",  # the response has no call that can be read
    "unknown_tool",
    "arguments",  # they do not fit the tool's parameters
    "exception",  # the tool raised one
    "too_large",  # its result is over a limit
    "memory",  # it needed too much: the process is replaced
    "timeout",  # it took too long: the process is replaced
    "died",  # its process ended, or sent an invalid message: it is replaced
    "turns",  # no more calls are allowed
    "lost",  # the environment cannot be rebuilt after the end of its process
    "closed",
]
ERROR_KINDS: tuple[ErrorKind, ...] = ErrorKind.__args__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class RolloutKey:
    """What the random numbers of a rollout's environment depend on, together with the turn.

    >>> RolloutKey(seed=1, step=7, task="3f9a:0", sample=2).group
    (1, 7, '3f9a:0')
    """

    seed: int
    step: int
    task: str
    sample: int

    @property
    def group(self) -> tuple[int, int, str]:
        """The rollouts of one prompt: their environments live in one process."""
        return self.seed, self.step, self.task

    def at(self, turn: int, call: int = 0) -> tuple[int | str, ...]:
        return self.seed, self.step, self.task, self.sample, "environment", turn, call


@dataclass(frozen=True)
class EnvironmentLimits:
    """What a rollout's environment may take. `Limits().message_bytes` bounds a message from its process.

    >>> EnvironmentLimits(images=1, image_pixels=100, text_characters=10).message_bytes < 70_000
    True
    """

    call_seconds: float = 30.0
    memory_bytes: int | None = None  # per process; None: together half of the machine
    text_characters: int = 20_000  # of a result
    images: int = 4  # of a result
    image_pixels: int = 4 << 20  # of an image
    turns: int = 32  # of a rollout
    calls: int = 16  # of a turn

    @property
    def message_bytes(self) -> int:
        """JSON takes up to 12 bytes for a character; the first message has the schemas of all tools."""
        return 3 * self.images * self.image_pixels + 12 * self.text_characters + (1 << 16)


@dataclass(frozen=True)
class ToolCall:
    """A call that a response asks for, or why it cannot be read.

    >>> ToolCall("zoom", {"box": [0, 0, 56, 28]}).error is None
    True
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, eq=False)
class ToolResult:
    """What a call, or `reset`, gives: the blocks of a message.

    >>> ToolResult("zoom", ("image 1:", np.zeros((28, 56, 3), np.uint8)), seconds=0.01).text
    'image 1:<image>'
    >>> ToolResult.failed("zoom", "unknown_tool", "Tool zoom not found.").text
    "{'error': 'Tool zoom not found.'}"
    """

    name: str
    content: tuple[Block, ...] = ()
    error: ErrorKind | None = None
    seconds: float = 0.0  # in the tool
    waited: float = 0.0  # from the request to the result: the tool, and others before it in the same process
    output: str = ""  # the end of what was printed meanwhile

    @classmethod
    def failed(cls, name: str, kind: ErrorKind, message: str, **fields: Any) -> ToolResult:
        """An error for the model to read, in the words in which TRL puts the exception of a tool."""
        return cls(name, (str({"error": message}),), kind, **fields)

    @property
    def text(self) -> str:
        return "".join(block if isinstance(block, str) else "<image>" for block in self.content)

    @property
    def images(self) -> list[Rgb]:
        return [block for block in self.content if not isinstance(block, str)]


@dataclass(frozen=True)
class ToolSet:
    """An environment class as its process describes it.

    >>> ToolSet("Zoo", ({"type": "function", "function": {"name": "zoom"}},), frozenset(), True).names
    ('zoom',)
    """

    class_name: str  # names its reward
    schemas: tuple[Mapping[str, Any], ...]  # for the chat template
    asynchronous: frozenset[str]  # methods that are coroutines
    rewards: bool  # it has `get_reward`

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(schema["function"]["name"] for schema in self.schemas)


@dataclass(frozen=True)
class ScoreResult:
    """A reward of an environment or of a function that saw it: a value (None: not applicable), or a failure.

    >>> ScoreResult(value=1.0, extras={"found": 1.0}).failure is None
    True
    """

    value: float | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    failure: str | None = None
