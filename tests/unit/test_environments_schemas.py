"""Schemas of tools as transformers makes them, and an example that gives the same in TRL's own code."""

import asyncio
import inspect
import json
from pathlib import Path
from typing import Any, Literal, Optional, Union

import numpy as np
import pytest
from PIL import Image
from transformers.utils import get_json_schema

from mtrl.environments.contract import describe, tool_methods
from mtrl.environments.json_schema import make_schema
from mtrl.environments.pool import EnvironmentPool
from mtrl.environments.randomness import GlobalRandomness
from mtrl.environments.records import RolloutKey, ToolCall
from mtrl.utils.plugins import load_plugin

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/environments/look_closer.py"


def simple(a: int, b: float, c: str = "x", d: bool = True):
    """One line.

    Args:
        a: The first.
        b: The second,
            on two lines.
        c: Third: with a colon.
        d:
            Below.
    """


def containers(a: list[int], b: list, c: dict[str, float], d: dict, e: tuple[int, str], f: list[list[float]]) -> str:
    """
    Several lines
    of description.

    And a paragraph.

    Args:
        a: A.
        b: B.

        c: C, after an empty line.
        d: D.
        e: E.
        f: F.

    Returns:
        What it returns,
        on two lines.

    Raises:
        ValueError: never.
    """


def unions(
    a: int | str, b: Optional[int], c: Union[list[int], None, str], d: Any, e: int | None = None,  # noqa: RUF036, UP007, UP045
    f: dict[str, Any] | None = None,
) -> list[dict]:  # fmt: skip
    """Unions.

    Args:
        a: A.
        b: B.
        c: C.
        d: D.
        e: E.
        f: F.

    Returns:
        A list."""


def choices(a: Literal["x", "y"], b: Literal[1, "z"], c: str, d: "int" = 3) -> None:
    """Choices.

    Args:
        a: A.
        b: B.
        c: C (choices: ["tea", " coffee "])
        d: D.
    """


def nothing():
    """Takes nothing, says nothing."""


@pytest.mark.parametrize("function", [simple, containers, unions, choices, nothing])
def test_a_schema_is_that_of_transformers(function):
    assert make_schema(function) == get_json_schema(function)


@pytest.mark.parametrize(
    "path",
    [str(EXAMPLE) + ":LookCloser", "mtrl.environments.image_tools:ImageTools",
     "mtrl.environments.image_tools:ImageTools1000"],
)  # fmt: skip
def test_schemas_of_methods_are_those_of_transformers(path):
    cls = load_plugin(path, "environment")
    tools = describe(cls)
    methods = [getattr(object.__new__(cls), name) for name in tool_methods(cls)]
    assert list(tools.schemas) == [get_json_schema(method) for method in methods] and len(methods) >= 2
    json.dumps(tools.schemas)


DESCRIBED = "'''Does.\\n\\n        Args:\\n            a: A.\\n        '''"
LACKING = {
    "no docstring": ("a: int", "", "has no docstring"), "no type": ("a", DESCRIBED, "no type hint for a"),
    "not described": ("a: int", "'Does.'", "does not describe a: a line below Args:"),
    "an odd type": ("a: tuple[int, ...]", DESCRIBED, "has no JSON schema; use int"),
    "a type that does not exist": ("a: 'Nothing'", DESCRIBED, "name 'Nothing' is not defined"),
}  # fmt: skip


@pytest.mark.parametrize("case", LACKING)
def test_what_a_tool_lacks_is_said(case):
    parameter, docstring, message = LACKING[case]
    space = {}
    tool = f"def tool(self, {parameter}):\n        {docstring or 'pass'}"
    exec(f"class Zoo:\n    def reset(self, **row): pass\n    {tool}\n", space)
    with pytest.raises(ValueError, match=message):
        describe(space["Zoo"])


def test_a_class_without_reset():
    with pytest.raises(ValueError, match=r"has no method reset; an environment begins with reset\(self, \*\*row\)"):
        describe(type("Zoo", (), {}))


# ---------------------------------------------------------------------------------------- the same file in TRL's hands
KEY = RolloutKey(seed=3, step=1, task="t", sample=0)
CALLS = [
    ToolCall("crop", {"left": 10, "top": 0, "right": 40, "bottom": 20}),
    ToolCall("crop", {"left": 40, "top": 0, "right": 10, "bottom": 20}),  # raises
    ToolCall("count_colours", {"most": 2}),
    ToolCall("crop", {"left": 0, "top": 0, "right": 5, "bottom": 6}),
]


def picture():
    pixels = np.random.default_rng(0).integers(0, 3, (70, 90, 3), dtype=np.uint8)
    return Image.fromarray(pixels * 100)


class Stopped(Exception):
    """TRL's loop has called the tools and goes on to tokens."""


class TrainerWithoutModel:
    """What `GRPOTrainer._tool_call_loop` reads before it calls the tools."""

    max_tool_calling_iterations = 1

    def __init__(self, environment):
        self.async_loop = asyncio.new_event_loop()
        methods = {name: getattr(environment, name) for name in tool_methods(type(environment))}
        self._sync_tool_dicts = [{n: m for n, m in methods.items() if not inspect.iscoroutinefunction(m)}]
        self._async_tool_dicts = [{n: m for n, m in methods.items() if inspect.iscoroutinefunction(m)}]

    def _get_tool_suffix_ids(self, messages):
        raise Stopped


def results_by_trl(environment, call):
    """The message that TRL's own loop makes of a call."""
    import threading

    from trl import GRPOTrainer

    trainer = TrainerWithoutModel(environment)
    thread = threading.Thread(target=trainer.async_loop.run_forever, daemon=True)
    thread.start()
    function = {"name": call.name, "arguments": dict(call.arguments)}
    completion = [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}]
    with pytest.raises(Stopped):
        GRPOTrainer._tool_call_loop(trainer, [[]], [[1]], [[2]], [completion], None, None, {})
    trainer.async_loop.call_soon_threadsafe(trainer.async_loop.stop)
    thread.join()
    return completion[-1]["content"]


def as_blocks(content):
    content = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [each["text"] if each["type"] == "text" else np.asarray(each["image"]) for each in content]


def same_blocks(content, others):
    assert len(content) == len(others)
    for block, other in zip(content, others, strict=True):
        assert type(block) is type(other)
        np.testing.assert_array_equal(block, other)


def test_the_example_gives_the_same_in_trl():
    pool = EnvironmentPool(f"{EXAMPLE}:LookCloser")
    (session,) = pool.open([{"images": [picture()], "answer": "x", "more": 1}], [KEY])
    begun = session.reset().result(timeout=120)
    results = [future.result(timeout=60) for future in pool.call([(session, call) for call in CALLS])]
    reward = session.reward().result(timeout=60)
    pool.close()

    environment = load_plugin(f"{EXAMPLE}:LookCloser", "environment")()
    with GlobalRandomness(KEY.at(0)).installed():
        content = environment.reset(images=[picture()], answer="x", more=1)
    same_blocks(begun.content, as_blocks(content))
    for result, call in zip(results, CALLS, strict=True):
        same_blocks(result.content, as_blocks(results_by_trl(environment, call)))
    assert [result.error for result in results] == [None, "exception", None, None]
    assert results[0].text == "look 1:<image>" and results[3].text == "look 2:<image>"
    assert reward.value == environment.get_reward() == 0.2
