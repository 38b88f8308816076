"""A response of several turns as a conversation, for logs: the model's words and the messages between them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from mtrl.report.markdown_text import number
from mtrl.types import EnvironmentTurn, Prompt, Rollouts

UNREADABLE = "unreadable call"  # in place of the name of its tool

DecodeText = Callable[[Sequence[int]], str]
Message = dict[str, Any]


def conversation(rollouts: Rollouts, row: int, decode: DecodeText) -> list[Message]:
    """The turns of a response and the messages between them; none if there is no message.

    [{"role": "assistant", "content": "<tool_call>.."},
     {"role": "tool", "content": "enlarged:<image>", "tools": ["zoom"], "errors": 0, "tokens": 24, "seconds": 0.25,
      "images": ["6b86b273ff34"]},
     {"role": "assistant", "content": "It is red."}]
    """
    observed = rollouts.observed[row]
    if observed is None or not observed.turns:
        return []
    own = rollouts.tokens[row][rollouts.mask[row]].tolist()
    messages: list[Message] = []
    begin = 0
    for turn in observed.turns:
        shown = {"role": "tool", **describe_message(turn), "images": digest_images(turn.message)}
        messages += [_write(decode(own[begin : turn.after])), shown]
        begin = turn.after
    return [*messages, _write(decode(own[begin:]))] if begin < len(own) else messages


def _write(text: str) -> Message:
    return {"role": "assistant", "content": text}


def digest_images(message: Prompt) -> list[str]:
    """A short digest of the pixels of each image, to tell whether two are equal."""
    return [hashlib.blake2b(each.tobytes(), digest_size=6).hexdigest() for each in message.media]


def describe_message(turn: EnvironmentTurn) -> Message:
    """A message of the environment without its pixels."""
    facts = {"tools": list(turn.tools), "errors": turn.errors, "tokens": len(turn.message.ids)}
    return {"content": turn.message.task.text, **facts, "seconds": round(turn.waited, 3)}


def list_facts(message: Message) -> str:
    """
    >>> list_facts({"tools": ["zoom", ""], "errors": 1, "tokens": 24, "seconds": 0.25})
    'zoom, unreadable call; 1 failed; 24 tokens; 0.25 s'
    """
    facts = [", ".join(name or UNREADABLE for name in message["tools"])]
    facts += [f"{message['errors']} failed"] if message["errors"] else []
    return "; ".join(filter(None, [*facts, f"{message['tokens']} tokens", f"{number(message['seconds'])} s"]))


def conversation_text(rollouts: Rollouts, row: int, decode: DecodeText) -> str:
    """A response as one text, with what the environment said where there is any."""
    parts = []
    for message in conversation(rollouts, row, decode):
        parts += [f"[{list_facts(message)}]"] if message["role"] == "tool" else []
        parts.append(message["content"])
    return "\n".join(parts) if parts else rollouts.text[row]
