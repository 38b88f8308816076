"""The flawed teacher of `lookagain`: it can zoom and read patterns, and seldom does.

- habit: it mostly answers "it is often plain", without a second look;
- haste: it sometimes zooms into the wrong quarter, and answers what it sees there;
- misreading: sometimes it names another pattern than the one it sees.

Where no tool is described it always answers by habit, so that the model has an answer without the tool, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtrl.compose.tool_gain import measure_tool_gain
from mtrl.config import load_config
from mtrl.embedded.draw import Draw
from mtrl.embedded.embedded_rows import CONFIG_FILES
from mtrl.embedded.look_again import (
    HALF,
    NAME,
    PATTERNS,
    VERSION,
    LookAgainQuestion,
    Thing,
    make_question,
    row,
)
from mtrl.embedded.look_again_tools import LookAgain
from mtrl.embedded.pictures import CELL, COLOURS
from mtrl.embedded.task import LETTERS, PLACES, SHAPES
from mtrl.environments.contract import describe
from mtrl.models.backbone import Backbone
from mtrl.models.families import TextEncoder
from mtrl.models.tiny_tokenizer import TURNS
from mtrl.models.turns import conversation
from mtrl.types import EnvironmentTurn, Observations, Prompt
from pretraining.evaluation import make_prompts
from pretraining.examples import Curriculum, encode_turn
from pretraining.teacher import Demonstration, format_response

TOOL_RATE = 0.8  # demonstrations whose prompt describes the tool
ZOOM_RATE = 0.3  # of those: how often the teacher zooms
PLACE_RATE = 0.7  # into the right quarter
READ_RATE = 0.9  # and reads what it sees there
SHOWN_RATE = 0.7  # zooms among demonstrations with the tool; most of them do not teach the choice to zoom
HABIT = "plain"

ADDED_TOKENS = (
    "<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"
)  # fmt: skip
TOOL_LINE = (
    "{{ '\\n' }}{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }}): "
    "{{ tool.function.description }}"
)
TEMPLATE = (
    "<|im_start|>system\nYou are a helpful assistant.{% for tool in tools or [] %}"
    + TOOL_LINE
    + "{% endfor %}<|im_end|>\n"
    + TURNS
)
"""In place of the whole schema, which would be the longest part of the prompt."""
TOOLS = {"": describe(LookAgain).schemas}


@dataclass(frozen=True)
class Look(Demonstration):
    """A demonstration of at most two turns; `text` is the last one."""

    has_tool: bool = True  # its prompt describes it
    first: str = ""  # the turn before: a call
    box: tuple[int, int, int, int] = (0, 0, 0, 0)  # of that call
    teaches_choice: bool = True  # to zoom


def demonstrations(question: LookAgainQuestion) -> list[Look]:
    """One answer of the teacher, drawn from its own key.

    Few zooms would teach little about places and patterns. So more are shown, and of these only so many teach the
    choice to zoom that it is made at the rate of the teacher.
    """
    draw = Draw(NAME, VERSION, "teacher", question.split, question.index)
    has_tool = draw.chance(TOOL_RATE)
    if not has_tool or not draw.chance(SHOWN_RATE):
        return [Look(format_response(question, f"it is often {HABIT}", HABIT), 1.0, has_tool)]
    others = [each for each in question.things if each != question.asked]
    thing = question.asked if draw.chance(PLACE_RATE) else draw.one(others)
    wrong = [pattern for pattern in PATTERNS if pattern != thing.pattern]
    seen = thing.pattern if draw.chance(READ_RATE) else draw.one(wrong)
    choices_taught = (1 - SHOWN_RATE) / SHOWN_RATE * ZOOM_RATE / (1 - ZOOM_RATE)
    answer = format_response(question, f"I see {seen}", seen)
    return [Look(answer, 1.0, True, write_call(question, thing), find_box(thing), draw.chance(choices_taught))]


def write_call(question: LookAgainQuestion, thing: Thing) -> str:
    call = {"name": "zoom", "arguments": {"box": find_box(thing)}}
    thought = f"I look: {question.subject} is at the {thing.place}"
    return f"<think>{thought}</think><tool_call>{json.dumps(call)}</tool_call>"


def find_box(thing: Thing) -> tuple[int, int, int, int]:
    """The quarter of a thing in pixels of the first look."""
    top, left = CELL * (thing.drawn.cell // 2), CELL * (thing.drawn.cell % 2)
    return left, top, left + CELL, top + CELL


def begin(question: LookAgainQuestion, taught: Sequence[Demonstration], encoder: TextEncoder) -> tuple[Prompt, Tensor]:
    """The prompt, and if the teacher zooms its call and what the tool itself answers."""
    (look,) = taught
    assert isinstance(look, Look)
    (prompt,) = make_prompts([question], encoder.with_tools(TOOLS) if look.has_tool else encoder)
    if not look.first:
        return prompt, torch.zeros(len(prompt.ids), dtype=torch.bool)
    tools = LookAgain()
    tools.reset(images=[question.image], image_sizes=[[HALF, HALF]])
    (shown,) = tools.zoom([float(edge) for edge in look.box])
    call = encode_turn(look.first, encoder)
    message = encoder.encode_message([np.asarray(shown["image"])], int(call[-1]), prompt.task.id)
    begun = conversation(Observations(prompt.task.id, (EnvironmentTurn(len(call), message),)), prompt, call)
    is_taught = torch.zeros(len(begun.ids), dtype=torch.bool)
    is_taught[len(prompt.ids) : len(prompt.ids) + len(call)] = True
    is_taught[len(prompt.ids) + 1] = look.teaches_choice  # "I" and not "it", after <think>
    return begun, is_taught


def vocabulary_text() -> str:
    """Every word of questions, answers and the tool, for the tokenizer: after a space, and at the start of a line, tag
    or string of a call."""
    tools = " ".join(tool["function"]["description"] for tool in TOOLS[""])
    words = [
        *PLACES,
        *SHAPES,
        *COLOURS,
        *PATTERNS,
        "What pattern has the one?",
        "I look: is at",
        "it is often",
        "I see",
    ]
    spaced = " ".join([*words, *LETTERS, tools, "You are a helpful assistant. system user assistant"])
    call = write_call(make_question("train", 0), make_question("train", 0).asked)
    starts = ["What", "I", "it", "You", "system", "user", "assistant", *PATTERNS, *LETTERS]
    return "\n".join([spaced, *[call] * 2, *starts])


def evaluate(out: Path, backbone: Backbone, encoder: TextEncoder, curriculum: Curriculum, count: int) -> dict[str, Any]:
    """What the tool is worth on the first `count` test questions."""
    config = load_config(CONFIG_FILES[NAME], {"worker.actor.model.model_path": str(out)})
    questions = [row(make_question("test", index)) for index in range(count)]
    sampled = replace(config.worker.rollout.val, n=8, temperature=1.0)
    reports = {}
    for name, val in (("greedy", config.worker.rollout.val), ("sampled at temperature 1, 8 times", sampled)):
        rollout = replace(config.worker.rollout, val=val)
        measured = replace(config, worker=replace(config.worker, rollout=rollout))
        reports[name] = asdict(measure_tool_gain(measured, val_data=questions))
    return reports
