"""From a row to a `Task`: its messages, its media and the columns for the reward.

A prompt is a string or a chat. `<image>` and `<video>` in its text, and `{"type": "image"}` parts of a chat, are marks:
the media of the row replace them in order. Without any mark the media come first in the first user message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrl.data.columns import MISSING, alias_columns, get_column
from mtrl.data.media import WITH_ARTICLE, Kind, make_medium, media_list
from mtrl.data.row_settings import DataError, DataSettings, DataSource, RowError, shorten
from mtrl.data.templates import PromptTemplate, load_template
from mtrl.data.unread import find_unread_media
from mtrl.types import Medium, Task

MARKS: dict[str, Kind] = {"<image>": "image", "<video>": "video"}
MARK = re.compile("(" + "|".join(MARKS) + ")")
Chat = list[tuple[str, str]]  # role and text with marks
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
    def from_settings(cls, settings: DataSettings) -> TaskBuilder:
        return cls(settings, load_template(settings.format_prompt))

    def build(self, source: DataSource, index: int) -> Task:
        """Build the task of a row, or raise RowError if the row cannot be used."""
        row, number, keys = source.read(index), source.row_number(index), self.settings
        media = {"image": self._read_media(row, source, "image"), "video": self._read_media(row, source, "video")}
        chat = self._make_chat(row)
        consumed = {keys.prompt_key, keys.answer_key, keys.image_key, keys.video_key}
        columns = {name: value for name, value in row.items() if name not in consumed}
        options = get_column(row, keys.options_key, MISSING)
        if options is not MISSING:  # rewards read this name, whatever the column is called
            if options is not None and not isinstance(options, (list, tuple, Mapping, str)):
                raise RowError(f"its options are a {type(options).__name__}; expected a list")
            columns["options"] = options
        counts = {kind: len(each) for kind, each in media.items()}
        messages, kinds = self._place_media(chat, counts, lambda: self.find_unread_media(source, columns))
        remaining = {kind: iter(each) for kind, each in media.items()}
        return Task(
            id=f"{source.fingerprint}:{number - 1}",
            origin=f"{source.name}, row {number}",
            messages=messages,
            media=tuple(next(remaining[kind]) for kind in kinds),
            answer=get_column(row, keys.answer_key),
            columns=columns,
            chat=not isinstance(get_column(row, keys.prompt_key), str),
        )

    def find_unread_media(self, source: DataSource, columns: Mapping[str, Any]) -> dict[Kind, str]:
        """Return the columns of a row without media that hold images or videos and that no key reads."""
        keys = self.settings
        read = {keys.prompt_key, keys.answer_key, keys.image_key, keys.video_key, keys.options_key, "options"}
        return find_unread_media(columns, read | alias_columns(source))

    def _read_media(self, row: Mapping[str, Any], source: DataSource, kind: Kind) -> list[Medium]:
        image_dir, keys = self.settings.image_dir, {"image": self.settings.image_key, "video": self.settings.video_key}
        directory = Path(image_dir).expanduser() if image_dir else source.directory
        return [make_medium(value, directory, kind) for value in media_list(get_column(row, keys[kind]))]

    def _place_media(
        self, chat: Chat, available: Mapping[str, int], find_unread: Callable[[], dict[Kind, str]]
    ) -> tuple[tuple[dict[str, Any], ...], list[str]]:
        """Return the messages, and the kinds of their media in order."""
        if any(available.values()):
            return place_media(chat, available)
        if self.settings.on_missing == "warn":  # without media, marks are text
            return tuple({"role": role, "content": text} for role, text in chat), []
        try:
            return place_media(chat, available)
        except RowError as error:
            raise RowError(f"{error}; {media_hint(chat, find_unread())}") from error

    def _make_chat(self, row: Mapping[str, Any]) -> Chat:
        """Read, format and check the messages; add the system prompt."""
        key = self.settings.prompt_key
        prompt = get_column(row, key, MISSING)
        if prompt is MISSING:
            names = ", ".join(map(str, list(row)[:20])) or "none"
            raise RowError(f"it has no column {key!r} (dataset.prompt_key); it has {names}")
        chat = read_chat(prompt)
        if self.template is not None:
            last = max(i for i, (role, _) in enumerate(chat) if role == "user")
            chat[last] = "user", self._render(row, chat[last][1])
        if not any(MARK.sub("", text).strip() for role, text in chat if role != "system"):
            raise RowError("the prompt is empty")
        if self.settings.system_prompt and chat[0][0] != "system":  # the row's own system message has priority
            chat.insert(0, ("system", self.settings.system_prompt))
        try:
            for _, text in chat:
                text.encode()
        except UnicodeEncodeError as error:
            raise RowError(f"the prompt is not valid Unicode ({error.reason} at character {error.start})") from error
        return chat

    def _render(self, row: Mapping[str, Any], content: str) -> str:
        """Apply the template to the columns of a row. Null counts as absent: tables cannot omit a value."""
        assert self.template is not None
        columns = {"options": get_column(row, self.settings.options_key), **row}
        values = {name: value for name, value in columns.items() if value is not None}
        try:
            return self.template.render(values | {"content": content})
        except DataError:  # an error of the template, not of the row
            raise
        except Exception as error:  # a template may do anything with a row's values
            raise RowError(f"the format prompt fails on it ({type(error).__name__}: {error})") from error


def read_chat(prompt: Any) -> Chat:
    """Convert a string or a list of messages to (role, text with marks)."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, (list, tuple)):
        raise RowError(f"the prompt is a {type(prompt).__name__}; expected text or a list of messages")
    chat = [_read_message(message) for message in prompt]
    if not any(text.strip() for role, text in chat if role == "user"):
        raise RowError("the prompt is empty")
    if chat[-1][0] not in ("user", "tool"):
        raise RowError(f"the prompt ends with a message of {chat[-1][0]!r}; it must end where the model answers")
    return chat


def media_hint(chat: Chat, unread: Mapping[Kind, str]) -> str:
    """Say which key would read the media that the marks of a chat ask for."""
    if unread:
        return "; ".join(f"the column {name!r} holds {kind}s: set dataset.{kind}_key={name}"
                         for kind, name in unread.items())  # fmt: skip
    keys = [f"dataset.{kind}_key" for mark, kind in MARKS.items() if any(mark in text for _, text in chat)]
    return f"set {' and '.join(keys)} to their column, or dataset.on_missing=warn to read marks as text"


def place_media(chat: Chat, available: Mapping[str, int]) -> tuple[tuple[dict[str, Any], ...], list[str]]:
    """Return messages with media parts in place of the marks, and the kinds of these parts in order."""
    marks: list[str] = [MARKS[mark] for _, text in chat for mark in MARK.findall(text)]
    if marks:
        for kind, count in available.items():
            if marks.count(kind) != count:
                raise RowError(f"the prompt has {_count(marks.count(kind), kind + ' mark')} for {_count(count, kind)}")
    first = [kind for kind, count in available.items() for _ in range(count)] if not marks else []
    user = next(i for i, (role, _) in enumerate(chat) if role == "user")
    messages = tuple(_make_message(role, text, first if i == user else []) for i, (role, text) in enumerate(chat))
    return messages, marks or first


def _make_message(role: str, text: str, first: list[str]) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": kind} for kind in first]
    for piece in MARK.split(text):
        if piece in MARKS:
            parts.append({"type": MARKS[piece]})
        elif piece:
            parts.append({"type": "text", "text": piece})
    if all(part["type"] == "text" for part in parts):  # chat templates of text-only models expect a string
        return {"role": role, "content": text}
    return {"role": role, "content": parts}


def _read_message(message: Any) -> tuple[str, str]:
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        raise RowError(f"a message of the prompt is not an object with role and content ({shorten(repr(message))})")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise RowError(f"a message of the prompt has role {shorten(repr(role))}; expected one of {', '.join(ROLES)}")
    if isinstance(content, (list, tuple)):
        content = "".join(_read_part(part) for part in content)
    if not isinstance(content, str):
        raise RowError(f"the content of a message is a {type(content).__name__}, not text")
    return role, content


def _read_part(part: Any) -> str:
    """Return the text of a part, with a mark for an image or a video."""
    name = part.get("type") if isinstance(part, Mapping) else None
    if name == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    for mark, kind in MARKS.items():
        is_address = name == f"{kind}_url"  # as in OpenAI's chats
        if is_address or (name == kind and any(part.get(key) is not None for key in (kind, "path", "url", "bytes"))):
            raise RowError(f"the prompt contains {WITH_ARTICLE[kind]} itself; put it in the column of {kind}s "
                           f'(dataset.{kind}_key), and {{"type": "{kind}"}} in its place')  # fmt: skip
        if name == kind:
            return mark
    raise RowError(f"a part of a message is neither text nor an image or video ({shorten(repr(part))})")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
