"""From a row to a `Task`: which text is asked, where its images stand, what the reward will know.

A prompt is a string or a chat. `<image>` and `<video>` in its text, and `{"type": "image"}` parts of a chat, are marks:
the media of the row take their places in order. Without any mark the media come first, in the first user message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrl.data.columns import MISSING, image_column, reach
from mtrl.data.media import Kind, image_medium, media_list
from mtrl.data.row_settings import DataError, DataSettings, RowError
from mtrl.data.sources import DataSource
from mtrl.data.templates import PromptTemplate, load_template
from mtrl.types import Medium, Task

MARKS = {"<image>": "image", "<video>": "video"}
MARK = re.compile("(" + "|".join(MARKS) + ")")
Chat = list[tuple[str, str]]  # role, and text with marks
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class TaskBuilder:
    """Makes the tasks of a dataset.

    >>> from mtrl.data.sources import RowList
    >>> rows = RowList([{"prompt": "<image>Which colour?", "images": "1.png", "answer": "B"}], "train.json")
    >>> TaskBuilder(DataSettings()).build(rows, 0).messages
    ({'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': 'Which colour?'}]},)
    """

    settings: DataSettings
    template: PromptTemplate | None = None

    @classmethod
    def of(cls, settings: DataSettings) -> TaskBuilder:
        return cls(settings, load_template(settings.format_prompt))

    def build(self, source: DataSource, index: int) -> Task:
        """Raises RowError when the row cannot be used."""
        row, number, keys = source.read(index), source.row_number(index), self.settings
        media = {"image": self._media(row, source, "image"), "video": self._media(row, source, "video")}
        chat = self._chat(row)
        taken = {keys.prompt_key, keys.answer_key, keys.image_key, keys.video_key}
        columns = {name: value for name, value in row.items() if name not in taken}
        options = reach(row, keys.options_key, MISSING)
        if options is not MISSING:  # rewards look under this name, whatever the column is called
            columns["options"] = _checked_options(options)
        messages, order = self._placed(chat, {kind: len(found) for kind, found in media.items()}, columns)
        following = {kind: iter(found) for kind, found in media.items()}
        return Task(
            id=f"{source.fingerprint}:{number - 1}",
            origin=f"{source.name}, row {number}",
            messages=messages,
            media=tuple(next(following[kind]) for kind in order),
            answer=reach(row, keys.answer_key),
            columns=columns,
            chat=not isinstance(reach(row, keys.prompt_key), str),
        )

    def _media(self, row: Mapping[str, Any], source: DataSource, kind: Kind) -> list[Medium]:
        image_dir, keys = self.settings.image_dir, {"image": self.settings.image_key, "video": self.settings.video_key}
        directory = Path(image_dir).expanduser() if image_dir else source.directory
        return [image_medium(value, directory, kind) for value in media_list(reach(row, keys[kind]))]

    def _placed(
        self, chat: Chat, available: Mapping[str, int], columns: Mapping[str, Any]
    ) -> tuple[tuple[dict[str, Any], ...], list[str]]:
        """The messages, and the kinds of their media in order."""
        none = not any(available.values())
        if none and self.settings.on_missing == "warn":  # marks are text where there is nothing to put there
            return tuple({"role": role, "content": text} for role, text in chat), []
        try:
            return place_media(chat, available)
        except RowError as error:
            column = image_column(columns) if none else None
            if column is not None:
                raise RowError(
                    f"{error}; the column {column!r} holds images: set dataset.image_key={column}"
                ) from error
            if none:
                told = "set dataset.image_key to their column, or dataset.on_missing=warn to take marks for text"
                raise RowError(f"{error}; {told}") from error
            raise

    def _chat(self, row: Mapping[str, Any]) -> Chat:
        """(role, text with marks) for every message, formatted, the system prompt before them."""
        key = self.settings.prompt_key
        prompt = reach(row, key, MISSING)
        if prompt is MISSING:
            raise RowError(f"it has no column {key!r} (dataset.prompt_key); it has {_names(row)}")
        chat = read_chat(prompt)
        if self.template is not None:
            last = max(i for i, (role, _) in enumerate(chat) if role == "user")
            chat[last] = "user", self._render(row, chat[last][1])
        if not any(MARK.sub("", text).strip() for role, text in chat if role != "system"):
            raise RowError("the prompt is empty")
        if self.settings.system_prompt and chat[0][0] != "system":  # a row's own system message wins
            chat.insert(0, ("system", self.settings.system_prompt))
        for _, text in chat:
            _check_unicode(text)
        return chat

    def _render(self, row: Mapping[str, Any], content: str) -> str:
        assert self.template is not None
        try:
            return self.template.render(self._template_names(row) | {"content": content})
        except DataError:  # the fault of the template, not of the row
            raise
        except Exception as error:  # a template may do anything with a row's values
            raise RowError(f"the format prompt fails on it ({type(error).__name__}: {error})") from error

    def _template_names(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The columns of a row, options also under the name that rewards know. Null is absent: tables have no other
        way to lack a value."""
        names = {"options": reach(row, self.settings.options_key), **row}
        return {name: value for name, value in names.items() if value is not None}


def read_chat(prompt: Any) -> Chat:
    """A string or a list of messages as (role, text with marks)."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, (list, tuple)):
        raise RowError(f"the prompt is a {type(prompt).__name__}; expected text or a list of messages")
    chat = [_read_message(message) for message in prompt]
    if not any(text.strip() for role, text in chat if role == "user"):
        raise RowError("the prompt is empty")
    if chat[-1][0] not in ("user", "tool"):
        raise RowError(f"the prompt ends with a message of {chat[-1][0]!r}; it must end where the model is to speak")
    return chat


def place_media(chat: Chat, available: Mapping[str, int]) -> tuple[tuple[dict[str, Any], ...], list[str]]:
    """Messages with media parts where the marks stand, and the kinds of these parts in order."""
    marks = [MARKS[mark] for _, text in chat for mark in MARK.findall(text)]
    if marks:
        for kind, count in available.items():
            if marks.count(kind) != count:
                raise RowError(f"the prompt has {_count(marks.count(kind), kind + ' mark')} for {_count(count, kind)}")
    first = [kind for kind, count in available.items() for _ in range(count)] if not marks else []
    at = next(i for i, (role, _) in enumerate(chat) if role == "user")
    messages = tuple(_message(role, text, first if i == at else []) for i, (role, text) in enumerate(chat))
    return messages, marks or first


def _message(role: str, text: str, first: list[str]) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": kind} for kind in first]
    for piece in MARK.split(text):
        if piece in MARKS:
            parts.append({"type": MARKS[piece]})
        elif piece:
            parts.append({"type": "text", "text": piece})
    if all(part["type"] == "text" for part in parts):  # the form that templates of text-only models know
        return {"role": role, "content": text}
    return {"role": role, "content": parts}


def _read_message(message: Any) -> tuple[str, str]:
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        raise RowError(f"a message of the prompt is not an object with role and content ({_short(message)})")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise RowError(f"a message of the prompt has role {_short(role)}; expected one of {', '.join(ROLES)}")
    if isinstance(content, (list, tuple)):
        content = "".join(_part_text(part) for part in content)
    if not isinstance(content, str):
        raise RowError(f"the content of a message is a {type(content).__name__}, not text")
    return role, content


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind in MARKS.values():
        if any(part.get(name) is not None for name in (kind, "path", "url", "bytes")):
            raise RowError(f"a {kind} stands inside the prompt; put it in the column of {kind}s")
        return f"<{kind}>"
    raise RowError(f"a part of a message is neither text nor a medium ({_short(part)})")


def _checked_options(options: Any) -> Any:
    if options is not None and not isinstance(options, (list, tuple, Mapping, str)):
        raise RowError(f"its options are a {type(options).__name__}; expected a list")
    return options


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"the prompt is not valid Unicode ({error.reason} at character {error.start})") from error


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(map(str, list(row)[:20])) or "none"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
