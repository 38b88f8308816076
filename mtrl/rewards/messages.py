"""Messages between a sandbox and its workers: a frame with the number of the job and the length, then that many bytes.

What goes to a worker is a pickle. What comes back is JSON and stays data: nothing in it is ever run, and whatever is
not exactly an answer to what was asked is no answer at all. Imports nothing heavy.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, BinaryIO

from mtrl.rewards.outcomes import LARGEST, TOKEN_WEIGHTS, Outcome, check_extras, last_words
from mtrl.rewards.signatures import Traits

FRAME = struct.Struct("!QQ")  # number of the job, bytes that follow
PLACE = struct.Struct("qq")  # a job, and which of its samples a worker is at, in memory that it shares with its owner
MOST_BYTES = 8 << 20  # longest message of a worker
MOST_ANSWER = 4 << 20  # longest answer on one response: token weights of 200,000 tokens
ENOUGH = 1 << 20  # bytes of answers that wait for no more


class WorkerLost(Exception):
    """The worker died, took too long or sent what is no answer, and must be replaced."""


# --------------------------------------------------------------------------------------------- the side of the worker
def read_frame(stream: BinaryIO) -> tuple[int, bytes] | None:
    """The next job and its message; None where the stream has ended."""
    frame = stream.read(FRAME.size)
    if len(frame) < FRAME.size:
        return None
    job, length = FRAME.unpack(frame)
    message = stream.read(length)
    return (job, message) if len(message) == length else None


def framed(job: int, message: bytes) -> bytes:
    return FRAME.pack(job, len(message)) + message


def written_answer(place: int | None, outcome: Outcome) -> str:
    if outcome.value is not None and not outcome.extras:  # most often, and several times as quick as `dumps`
        return f"[{place}, {outcome.value!r}, {{}}, null, {outcome.seconds!r}]"
    text = json.dumps([place, outcome.value, outcome.extras, outcome.failure, outcome.seconds])
    if len(text) <= MOST_ANSWER:
        return text
    much = f"its extra values take {len(text):,} bytes; at most {MOST_ANSWER:,} can be told"
    return json.dumps([place, None, {}, much, outcome.seconds])


def written_answers(answers: list[str], ends: bool) -> bytes:
    return f'{{"answers": [{", ".join(answers)}], "ends": {json.dumps(ends)}}}'.encode()


def written_start(traits: Traits | None, error: str, contained: bool) -> bytes:
    """The first message: the function's traits, or why there is none."""
    told = None if traits is None else asdict(traits)
    return json.dumps({"traits": told, "error": last_words(error), "contained": contained}).encode()


# ------------------------------------------------------------------------------------------- the side of the trainer
Answer = tuple[int | None, Outcome]


def read_start(message: bytes) -> tuple[Traits | None, str, bool]:
    """Traits or an error, and whether whatever the worker starts will end with it."""
    try:
        told = json.loads(message)
        error, traits = last_words(told["error"]), told["traits"]
        if traits is not None:
            name = None if traits["name"] is None else last_words(traits["name"], 100)
            traits = Traits(traits["batch"] is True, traits["concurrent"] is True, traits["signals"] is True, name)
        return traits, error, told["contained"] is True
    except Exception:  # whatever a worker may send
        raise WorkerLost("its process sent what is no answer") from None


def read_answers(message: bytes, waiting: Mapping[int, int], output: str) -> tuple[list[Answer], bool]:
    """The outcomes in a message, and whether the worker ends now. `waiting`: the places that an answer may be for, and
    the number of tokens at each. No place: all of them."""
    try:
        told, left = json.loads(message), dict(waiting)
        answers = [_answer(*each, output=output, left=left) for each in told["answers"]]
        if not answers:
            raise ValueError("an empty message")
        return answers, told["ends"] is True
    except Exception:
        raise WorkerLost("its process sent what is no answer") from None


def _answer(
    place: Any, value: Any, extras: Any, failure: Any, seconds: Any, *, output: str, left: dict[int, int]
) -> Answer:
    """Raises an error of any kind where these are not the fields of an outcome, or nobody waits for it (any more)."""
    if type(place) is not int and place is not None:
        raise TypeError("no place")
    tokens = max(left.values()) if place is None else left.pop(place)
    if place is None:
        left.clear()
    if failure is not None:
        return place, Outcome(failure=last_words(failure) or "no reason given", output=output, seconds=_number(seconds))
    check_extras(extras)
    if extras and extras.get(TOKEN_WEIGHTS):
        extras[TOKEN_WEIGHTS] = extras[TOKEN_WEIGHTS][:tokens]
    return place, Outcome(None if value is None else _number(value), extras, None, output, _number(seconds))


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise ValueError(f"no finite number: {value!r:.100}")
    return float(value)
