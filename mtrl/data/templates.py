"""The Jinja file of `dataset.format_prompt`, in a sandbox: it may write text of a row, and nothing else.

It cannot reach Python behind a value or change one; what it writes, how often it loops and calls and how large its
numbers are is bounded, so that a template that would never end is an error within seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from mtrl.data.row_settings import DataError
from mtrl.utils.files import regular_file

MOST_WORK = 1_000_000  # loop rounds and calls of one rendering, and the largest number that it may repeat or pad by
MOST_TEXT = 4_000_000  # characters of a rendered prompt
LARGE_ROW = 10_000  # characters, items and numbers of a row whose own fault it may be that a template does too much


class TooMuch(SecurityError):
    """Beyond a bound: of a template that would never end, or of a row that is huge."""


class PromptTemplate:
    """
    >>> PromptTemplate("{{ content }} {% for option in options %}{{ loop.index }}. {{ option }} {% endfor %}").render(
    ...     {"content": "Which?", "options": ["a cat", "a dog"]})
    'Which? 1. a cat 2. a dog '
    """

    def __init__(self, text: str, name: str = "template") -> None:
        self.text, self.name, self.environment = text, name, PromptEnvironment()
        tree = self.environment.parse(text)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
        self.template = self.environment.from_string(tree)

    def render(self, names: Mapping[str, Any]) -> str:
        """The text of a row. DataError: the template does what none may; any other error is about this row's values."""
        self.environment.begin()
        pieces, length = [], 0
        try:
            for piece in self.template.generate(names):
                length += len(piece)
                if length > MOST_TEXT:
                    raise TooMuch(f"it writes more than {MOST_TEXT:,} characters")
                pieces.append(piece)
        except SecurityError as error:
            if isinstance(error, TooMuch) and _size(names.values()) > LARGE_ROW:
                raise ValueError(f"the row is too large for it: {error}") from error
            raise DataError(f"dataset.format_prompt {self.name} does what a template may not: {error}") from error
        return "".join(pieces)

    def strange_names(self, columns: Set[str]) -> list[str]:
        """Names in the template that are no column: most often misspelt. Options are known, since rows may do
        without."""
        tree = self.environment.parse(self.text)
        known = {"content", "options", *columns, *self.environment.globals}
        return sorted(jinja2.meta.find_undeclared_variables(tree) - known)


class PromptEnvironment(ImmutableSandboxedEnvironment):
    """Counts rounds and calls. Threads render at the same time, each with a count of its own."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def __init__(self) -> None:
        super().__init__()
        self.filters["counted"] = self.counted
        del self.globals["lipsum"]  # random text is no prompt
        for name in ("center", "format", "indent", "truncate", "wordwrap"):  # they are called by no way that counts
            self.filters[name] = self._modest_filter(self.filters[name])
        self._done = threading.local()

    def begin(self) -> None:
        self._done.work = 0

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._count()
            yield value

    def call(self, context: Any, function: Any, /, *arguments: Any, **named: Any) -> Any:
        self._count()
        _refuse_large([*arguments, *named.values()])
        return super().call(context, function, *arguments, **named)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self._count()
        if operator == "**" or not all(isinstance(each, (int, float)) for each in (left, right)):
            _refuse_large([left, right])
        return super().call_binop(context, operator, left, right)

    def _count(self) -> None:
        self._done.work += 1
        if self._done.work > MOST_WORK:
            raise TooMuch(f"it loops and calls more than {MOST_WORK:,} times")

    def _modest_filter(self, filter: Any) -> Any:
        def modest(*arguments: Any, **named: Any) -> Any:
            _refuse_large([*arguments, *named.values()])
            return filter(*arguments, **named)

        modest.__dict__.update(vars(filter))  # whether it wants to be given the environment
        return modest


def _refuse_large(values: Iterable[Any]) -> None:
    """Text times a large number, or padded to it, fills the memory at one stroke."""
    for value in values:
        if isinstance(value, (int, float)) and abs(value) > MOST_WORK:
            raise TooMuch(f"it calculates with a number above {MOST_WORK:,}")


def _size(values: Collection[Any]) -> float:
    """Characters and items, and numbers as what a template may make of them."""
    numbers = (min(abs(v), 10**9) for v in values if isinstance(v, (int, float)))
    return sum(numbers) + sum(len(v) for v in values if hasattr(v, "__len__"))


def template_text(path: str) -> str:
    return regular_file(Path(path).expanduser()).read_text(encoding="utf-8").strip()


def load_template(path: str | None) -> PromptTemplate | None:
    """The template sees the row's columns, and the prompt as `content`. A column that a row lacks is false and renders
    as nothing."""
    if path is None:
        return None
    try:
        return PromptTemplate(template_text(path), path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"dataset.format_prompt {path} cannot be read: {why}") from error
    except (jinja2.TemplateError, RecursionError) as error:
        raise DataError(f"dataset.format_prompt {path} is not a Jinja template: {error}") from error
