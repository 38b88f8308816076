"""Messages between a sandbox and its workers, each in a frame (`mtrl/sandbox/frames.py`).

Messages to a worker are pickles. Messages from a worker are JSON, so nothing in them is ever run; a message that is not
exactly the outcome of a pending sample is rejected. Imports nothing heavy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mtrl.rewards.outcomes import LARGEST, TOKEN_WEIGHTS, Outcome, check_extras
from mtrl.rewards.signatures import Traits
from mtrl.sandbox.frames import INVALID, WorkerLost
from mtrl.sandbox.plain_text import sanitize_tail

MAX_OUTCOME_BYTES = 4 << 20  # one response: token weights of 200,000 tokens
FLUSH_BYTES = 1 << 20  # a worker sends its outcomes when they reach this size


# ---------------------------------------------------------------------------------------------------- in the worker
def encode_outcome(index: int | None, outcome: Outcome) -> str:
    """Encode the outcome of one sample; an index of None stands for all samples of the job."""
    if outcome.value is not None and not outcome.extras:  # the usual case, several times as fast as `dumps`
        return f"[{index}, {outcome.value!r}, {{}}, null, {outcome.seconds!r}]"
    text = json.dumps([index, outcome.value, outcome.extras, outcome.failure, outcome.seconds])
    if len(text) <= MAX_OUTCOME_BYTES:
        return text
    failure = f"its extra values take {len(text):,} bytes, more than {MAX_OUTCOME_BYTES:,}"
    return json.dumps([index, None, {}, failure, outcome.seconds])


def encode_outcomes(outcomes: list[str], ends: bool) -> bytes:
    return f'{{"answers": [{", ".join(outcomes)}], "ends": {json.dumps(ends)}}}'.encode()


def encode_start(traits: Traits | None, error: str, contained: bool) -> bytes:
    """Encode the first message: the function's traits, or why it cannot be loaded."""
    fields = None if traits is None else asdict(traits)
    return json.dumps({"traits": fields, "error": sanitize_tail(error), "contained": contained}).encode()


# --------------------------------------------------------------------------------------------------- in the trainer
def read_start(message: bytes) -> tuple[Traits | None, str, bool]:
    """Return traits or an error, and whether all processes that the worker starts will end with it."""
    try:
        fields = json.loads(message)
        error, traits = sanitize_tail(fields["error"]), fields["traits"]
        if traits is not None:
            name = None if traits["name"] is None else sanitize_tail(traits["name"], 100)
            traits = Traits(traits["batch"] is True, traits["concurrent"] is True, traits["signals"] is True, name)
        return traits, error, fields["contained"] is True
    except Exception:  # a worker may send anything
        raise WorkerLost(INVALID) from None


def read_outcomes(
    message: bytes, pending: Mapping[int, int], output: str
) -> tuple[list[tuple[int | None, Outcome]], bool]:
    """Return the outcomes in a message, and whether the worker ends now. `pending`: the indices of the samples that
    wait, and their numbers of tokens. An index of None stands for all of them."""
    try:
        fields, left = json.loads(message), dict(pending)
        outcomes = [_read_outcome(*each, output=output, left=left) for each in fields["answers"]]
        if not outcomes:
            raise ValueError("an empty message")
        return outcomes, fields["ends"] is True
    except Exception:
        raise WorkerLost(INVALID) from None


def _read_outcome(
    index: Any, value: Any, extras: Any, failure: Any, seconds: Any, *, output: str, left: dict[int, int]
) -> tuple[int | None, Outcome]:
    """Raise an error of any kind if these are not the fields of an outcome, or its sample is not pending."""
    if type(index) is not int and index is not None:
        raise TypeError("no index")
    tokens = max(left.values()) if index is None else left.pop(index)
    if index is None:
        left.clear()
    duration = _check_number(seconds)
    if failure is not None:
        return index, Outcome(failure=sanitize_tail(failure) or "no reason given", output=output, seconds=duration)
    check_extras(extras)
    if extras and extras.get(TOKEN_WEIGHTS):
        extras[TOKEN_WEIGHTS] = extras[TOKEN_WEIGHTS][:tokens]
    return index, Outcome(None if value is None else _check_number(value), extras, None, output, duration)


def _check_number(value: Any) -> float:
    if not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise ValueError(f"not a finite number: {value!r:.100}")
    return float(value)
