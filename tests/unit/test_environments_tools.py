"""The tools that come with MTRL, and verl's tools as an environment: without processes, but for one test."""

import asyncio
import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from environment_helpers import call, key
from PIL import Image

from mtrl.environments.calculator import calculate
from mtrl.environments.contract import check_arguments, describe
from mtrl.environments.image_tools import ImageTools, ImageTools1000
from mtrl.environments.pool import EnvironmentPool
from mtrl.environments.verl_tools import make_environment

RED, BLUE = (220, 40, 40), (40, 80, 220)


def picture():
    """Blue, 200 x 100, with a red square of 20 x 20 at (120, 40)."""
    pixels = np.full((100, 200, 3), BLUE, np.uint8)
    pixels[40:60, 120:140] = RED
    return Image.fromarray(pixels)


def tools(cls=ImageTools, **row):
    environment = cls()
    environment.reset(images=[picture()], **row)
    return environment


def shown(blocks):
    return np.asarray(blocks[1]["image"])


# ------------------------------------------------------------------------------------------------------------- images
@pytest.mark.parametrize(
    ("cls", "row", "box"),
    [
        (ImageTools, {}, [120, 40, 140, 60]),
        (ImageTools, {"image_sizes": [[100, 50]]}, [60, 20, 70, 30]),  # the model sees it at half its size
        (ImageTools, {"image_sizes": [(400, 200)]}, [240, 80, 280, 120]),
        (ImageTools1000, {}, [600, 400, 700, 600]),
        (ImageTools1000, {"image_sizes": [[100, 50]]}, [600, 400, 700, 600]),
    ],
)
def test_a_box_in_the_models_coordinates_is_that_region_of_the_original(cls, row, box):
    """The red square, in every convention: nothing but red is shown, as large as the image was."""
    environment = tools(cls, **row)
    text, image = environment.zoom(box)
    side = max(row.get("image_sizes", [(200, 100)])[0])
    assert text["text"] == f"Image 2, the region {box} of image 1:" and image["image"].size == (side, side)
    assert np.unique(shown([text, image]).reshape(-1, 3), axis=0).tolist() == [list(RED)]


def test_a_region_of_a_region():
    """The second zoom counts in the coordinates of what the first one showed."""
    environment = tools()
    first = environment.zoom([100, 20, 160, 80])  # 60 x 60, shown as 200 x 200; the square is a third of it
    assert first[1]["image"].size == (200, 200)
    second = environment.zoom([70, 70, 130, 130], image=2)
    assert np.unique(shown(second).reshape(-1, 3), axis=0).tolist() == [list(RED)]


def test_marks_and_turns():
    environment = tools()
    marked = shown(environment.mark([120, 40, 140, 60]))
    assert (
        marked.shape == (100, 200, 3) and marked[40, 130].tolist() == [255, 0, 0] and marked[50, 130].tolist() == [*RED]
    )
    turned = shown(environment.rotate(90))
    assert turned.shape == (200, 100, 3) and turned[130, 50].tolist() == [*RED]  # clockwise: (x, y) goes to (99 - y, x)
    assert turned[60, 50].tolist() == [*BLUE]
    assert shown(environment.rotate(-90))[70, 50].tolist() == [*RED]
    np.testing.assert_array_equal(np.asarray(environment._shown[0].picture), np.asarray(picture()))


PIXELS, THOUSAND = "from 0 to 200 across and from 0 to 100 down", "from 0 to 1000 across and from 0 to 1000 down"
WRONG = {
    "swapped": (ImageTools, [140, 40, 120, 60], "its left edge must be smaller than the right"),
    "upside down": (ImageTools, [120, 60, 140, 40], "its top must be smaller than the bottom"),
    "empty": (ImageTools, [120, 40, 120, 60], "swapped or empty"),
    "outside": (ImageTools, [120, 40, 240, 60], f"reaches beyond image 1: write .left, top, right, bottom., {PIXELS}"),
    "negative": (ImageTools, [-1, 40, 140, 60], "reaches beyond image 1"),
    "of the other convention": (ImageTools, [600, 400, 700, 600], PIXELS),
    "over a thousand": (ImageTools1000, [600, 400, 1001, 600], THOUSAND),
    "three numbers": (ImageTools, [1, 2, 3], f"must be four numbers: .left, top, right, bottom., {PIXELS}"),
    "texts": (ImageTools, ["1", "2", "3", "4"], "must be four numbers"),
    "a text": (ImageTools, "1 2 3 4", "four numbers"),
    "not a number": (ImageTools, [math.nan, 0, 1, 1], "swapped or empty"),
    "infinite": (ImageTools, [0, 0, math.inf, 100], "reaches beyond"),
    "too small": (ImageTools, [10, 10, 11, 12], "only 1 x 2 pixels large: choose a larger box"),
    "too narrow": (ImageTools, [0, 0, 200, 5], "too narrow"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_box_is_told_how_to_write_it(case):
    cls, box, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        tools(cls).zoom(box)


@pytest.mark.parametrize("image", [0, 2, -1, "1", 1.5])
def test_an_image_that_is_not_there(image):
    with pytest.raises(ValueError, match="counted from 1 to 1"):
        tools().mark([0, 0, 100, 100], image)
    with pytest.raises(ValueError, match="counted from 1 to 1"):
        tools().rotate(90, image)


@pytest.mark.parametrize("degrees", [math.nan, math.inf, 361])
def test_angles(degrees):
    with pytest.raises(ValueError, match="from -360 to 360"):
        tools().rotate(degrees)


def test_a_large_image_is_shown_smaller():
    environment = ImageTools()
    environment.reset(images=[Image.new("L", (4000, 3000))])
    assert environment.rotate(0)[1]["image"].size == (1024, 768)
    assert environment.zoom([0, 0, 400, 300])[1]["image"].size == (1024, 768)


# --------------------------------------------------------------------------------------------------------- arithmetic
@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 * (3 + 4) ** 2", 98), ("7 // 2 - 7 % 4", 0), ("-3 + +2", -1), ("1 / 4", 0.25), ("2 ** -1", 0.5),
        ("sqrt(16) + abs(-2)", 6.0), ("max(1, 2, 3) - min(4, 5)", -1), ("round(2.6)", 3), ("floor(-0.5)", -1),
        ("2 * pi", 2 * math.pi), (" 1 ", 1), ("2 ** 4000 % 7", 2**4000 % 7), ("(-1) ** 99999999999", -1),
    ],
)  # fmt: skip
def test_numbers(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("9 ** 9 ** 9", "too large"), ("9.0 ** 9999", "too large"), ("2 ** 4097", "too large"),
        ("3 ** 4000", "too large"),
        ("exp(1000)", "too large"), ("(2 ** 4000) * (2 ** 4000)", "too large"), ("1e999", "too large"),
        ("(-8) ** 0.5", "root of a negative"),
        ("1 / 0", "division by zero"), ("1 +", "is no arithmetic"), ("", "is no arithmetic"),
        ("x + 1", "'x' cannot be"), ("__import__('os')", "cannot be computed"),
        ("(1).__class__", "cannot be computed"), ("[1] * 9", "cannot be"),
        ("'a' * 9", "cannot be computed"), ("lambda: 1", "cannot be computed"), ("1 if 1 else 2", "cannot be computed"),
        ("sqrt(-1)", "math domain error"), ("abs(1, 2)", "argument"), ("round(1, ndigits=-9)", "cannot be computed"),
        ("round(1, -999999999)", "argument"), ("True + 1", "'True' cannot"), ("1j", "cannot be computed"),
        ("1 < 2", "a comparison cannot be computed"), ("(" * 150, "is no arithmetic"), ("-" * 199 + "1", "1|arith"),
        ("1" * 201, "201 characters; at most 200"), ("\x00", "is no arithmetic"), ("2 << 9", "cannot be computed"),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_is_said(expression, message):
    if expression.startswith("---"):
        assert calculate(expression) == -1  # deep, and harmless
        return
    with pytest.raises(ValueError, match=message):
        calculate(expression)


def test_the_calculator_says_a_text():
    assert tools().calculator("1 / 3") == "0.333333333333" and tools().calculator("2 ** 70") == str(2**70)


# --------------------------------------------------------------------------------------------------------- verl's tools
@dataclass
class FakeResponse:
    """verl's ToolResponse: a look-alike, since verl is not installed."""

    text: str | None = None
    image: list | None = None
    video: list | None = None


class FakeSchema(dict):
    """verl's OpenAIFunctionToolSchema, of which only this is used."""

    def model_dump(self, exclude_unset, exclude_none):
        return {name: value for name, value in self.items() if value is not None or not exclude_none}


@dataclass
class FakeCounter:
    """A look-alike of a BaseTool with state."""

    config: dict
    tool_schema: FakeSchema
    states: dict = field(default_factory=dict)

    async def create(self, instance_id=None, **kwargs):
        self.states[name := f"id{len(self.states)}"] = kwargs["create_kwargs"].get("start", 0)
        return name, FakeResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        self.states[instance_id] += parameters["by"]
        response = FakeResponse(f"now {self.states[instance_id]}", [picture()])
        return response, 0.25, {"calls": 1}

    async def calc_reward(self, instance_id, **kwargs):
        return float(self.states[instance_id])

    async def release(self, instance_id, **kwargs):
        del self.states[instance_id]


def word_count(text: str) -> dict:
    """Counts words.

    Args:
        text: A text.
    """
    return {"words": len(text.split())}


async def echo(text: str, times: int = 1):
    """Repeats.

    Args:
        text: A text.
        times: How often.
    """
    return FakeResponse(text * times), 0.5, {}


def fake_counter(name="count"):
    schema = {"name": name, "description": "Counts.", "parameters": {"type": "object", "properties": {}}}
    return FakeCounter({}, FakeSchema(type="function", function=schema, strict=None))


def test_verls_tools_are_an_environment():
    counter = fake_counter()
    cls = make_environment(counter, word_count, echo)
    described = describe(cls)
    assert described.names == ("count", "echo", "word_count") and described.rewards
    assert described.schemas[0] == {"type": "function", "function": counter.tool_schema["function"]}
    assert described.asynchronous == {"count", "echo", "reset", "get_reward", "_close"}

    async def live():
        first, second = cls(), cls()
        await first.reset(extra_info={"tools_kwargs": {"count": {"create_kwargs": {"start": 5}}}})
        await second.reset(question="?")
        blocks = await first.count(by=2)
        assert [each["type"] for each in blocks] == ["image", "text"] and blocks[1]["text"] == "now 7"
        assert (await second.count(by=1))[1]["text"] == "now 1", "each rollout has its own"
        assert first.word_count(text="a b c") == {"words": 3}
        assert await first.echo(text="a", times=2) == [{"type": "text", "text": "aa"}]
        assert await first.get_reward() == 0.25 + 0.5 + 7 and await second.get_reward() == 0.25 + 1
        assert "missing a required argument: 'text'" in check_arguments(first.echo, {})
        await first._close()
        await second._close()

    asyncio.run(live())
    assert counter.states == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((fake_counter(), fake_counter()), "two tools have the name count"),
        ((word_count, word_count), "two tools have the name word_count"),
        ((fake_counter("reset"),), "no tool may have the name reset"),
        ((FakeCounter({}, None),), "the tool FakeCounter has no tool_schema"),
        ((len,), "the tool len has no type hint"),
    ],
)
def test_tools_that_cannot_be_used(given, message):
    with pytest.raises(ValueError, match=message):
        make_environment(*given)


def test_they_run_in_a_process_and_are_released(tmp_path):
    path = tmp_path / "tools.py"
    path.write_text(
        "import os\nfrom mtrl.environments.verl_tools import make_environment\n"
        "class Counter:\n"
        "    tool_schema = {'type': 'function', 'function': {'name': 'count', 'parameters': {'properties': {}}}}\n"
        "    async def create(self, instance_id=None, **kw): self.n = 0; return 'id'\n"  # as older ones
        "    async def execute(self, instance_id, parameters, **kw): self.n += 1; return str(self.n), 1.0, {}\n"
        "    async def calc_reward(self, instance_id, **kw): return 0.0\n"
        f"    async def release(self, instance_id, **kw): open({str(tmp_path / 'released')!r}, 'w').close()\n"
        "Tools = make_environment(Counter())\n"
    )
    pool = EnvironmentPool(f"{path}:Tools")
    (session,) = pool.open([{}], [key()])
    assert session.reset().result(60).content == ()
    assert [call(session, "count").text for _ in range(2)] == ["1", "2"]
    session.close()
    (other,) = pool.open([{}], [key(1)])
    assert other.reset().result(60).error is None  # after the first one's end
    assert (tmp_path / "released").exists()
    pool.close()
