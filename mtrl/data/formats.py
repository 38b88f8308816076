"""Detect the format of rows (MTRL, EasyR1, TRL, verl, ShareGPT), and split conversations into prompt and answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

CONVERSATIONS = ("conversations", "messages")  # columns with a whole chat, including the answer
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
UNKNOWN = "unknown format"


class Conversation(NamedTuple):
    prompt: list[dict[str, Any]]  # role and content
    truth: str | None  # the last message, if it is the assistant's


def read_conversation(value: Any, system: Any = None) -> Conversation | None:
    """Read messages as {from, value} or {role, content}; None for anything else.

    >>> read_conversation([{"from": "human", "value": "<image>Which?"}, {"from": "gpt", "value": "B"}])
    Conversation(prompt=[{'role': 'user', 'content': '<image>Which?'}], truth='B')
    """
    if not isinstance(value, (list, tuple)) or not value:
        return None
    messages = [message for each in value if (message := _read_message(each))]
    if len(messages) < len(value) or not all(isinstance(message["role"], str) for message in messages):
        return None
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    if messages[-1]["role"] != "assistant":
        return Conversation(messages, None)
    return Conversation(messages[:-1], _get_text(messages[-1]["content"]))


def _read_message(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, Mapping):
        return None
    if value.get("from") is not None and "value" in value:
        return {"role": ROLES.get(value["from"], value["from"]), "content": value["value"]}
    if value.get("role") is not None and "content" in value:
        return {"role": value["role"], "content": value["content"]}
    return None


def _get_text(content: Any) -> str | None:
    if isinstance(content, (list, tuple)):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        content = "".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else None


def detect_format(row: Mapping[str, Any]) -> str:
    """Describe the format of a row by its columns.

    >>> detect_format({"problem": "<image>Which?", "images": ["1.png"], "answer": "B"})
    'EasyR1 (problem, answer, images)'
    """
    columns: tuple[str, ...]
    whole = next((name for name in CONVERSATIONS if read_conversation(row.get(name))), None)
    if "prompt" not in row and whole is not None:
        first = row[whole][0]
        name, columns = ("ShareGPT" if "from" in first else "chat messages"), (whole, "system", "image", "images")
    elif isinstance(row.get("reward_model"), Mapping):
        name, columns = "verl", ("prompt", "data_source", "reward_model", "extra_info", "images")
    elif "problem" in row and "answer" in row:
        name, columns = "EasyR1", ("problem", "answer", "image", "images")
    elif isinstance(row.get("prompt"), (list, tuple)) or ("solution" in row and {"problem", "prompt"} & row.keys()):
        name, columns = "TRL", ("prompt", "problem", "image", "images", "solution", "ground_truth", "answer")
    elif "prompt" in row:
        name, columns = "MTRL's own", ("prompt", "answer", "options", "image", "images")
    elif "question" in row or "problem" in row:
        name, columns = "questions", ("question", "problem", "answer", "solution", "options", "image", "images")
    else:
        return UNKNOWN
    return f"{name} ({', '.join(column for column in columns if column in row)})"
