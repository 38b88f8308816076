"""The Jinja file of `dataset.format_prompt`, in a sandbox: it can format the text of a row, and nothing else.

It cannot reach Python attributes of a value or change one. The length of its output, its loops and calls and the size
of its numbers are limited, so that a template that would never end is an error within seconds.
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

MAX_OPERATIONS = 1_000_000  # loop iterations and calls of one rendering; also the largest number it may use
MAX_CHARACTERS = 4_000_000  # length of a rendered prompt
LARGE_ROW = 10_000  # a row with more characters, items and numbers may itself cause an excess


class TemplateLimitExceeded(SecurityError):
    """The template would never end, or the row is huge."""


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
            loop.iter = nodes.Filter(loop.iter, "count_iterations", [], [], None, None, lineno=loop.lineno)
        self.template = self.environment.from_string(tree)

    def render(self, names: Mapping[str, Any]) -> str:
        """Return the text of a row. DataError: the template is at fault; any other error is about this row's values."""
        self.environment.reset()
        pieces, length = [], 0
        try:
            for piece in self.template.generate(names):
                length += len(piece)
                if length > MAX_CHARACTERS:
                    raise TemplateLimitExceeded(f"it writes more than {MAX_CHARACTERS:,} characters")
                pieces.append(piece)
        except SecurityError as error:
            if isinstance(error, TemplateLimitExceeded) and _size(names.values()) > LARGE_ROW:
                raise ValueError(f"the row is too large for it: {error}") from error
            raise DataError(f"dataset.format_prompt {self.name} does what a template may not: {error}") from error
        return "".join(pieces)

    def unknown_names(self, columns: Set[str]) -> list[str]:
        """Return names in the template that are not columns, usually misspelled. `options` is optional in rows."""
        tree = self.environment.parse(self.text)
        known = {"content", "options", *columns, *self.environment.globals}
        return sorted(jinja2.meta.find_undeclared_variables(tree) - known)


class PromptEnvironment(ImmutableSandboxedEnvironment):
    """Counts iterations and calls, separately in each thread."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def __init__(self) -> None:
        super().__init__()
        self.filters["count_iterations"] = self.count_iterations
        del self.globals["lipsum"]  # random text
        for name in ("center", "format", "indent", "truncate", "wordwrap"):  # these calls are not intercepted
            self.filters[name] = self._limit_filter(self.filters[name])
        self._local = threading.local()

    def reset(self) -> None:
        self._local.operations = 0

    def count_iterations(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._count()
            yield value

    def call(self, context: Any, function: Any, /, *arguments: Any, **named: Any) -> Any:
        self._count()
        _check_numbers([*arguments, *named.values()])
        return super().call(context, function, *arguments, **named)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self._count()
        if operator == "**" or not all(isinstance(each, (int, float)) for each in (left, right)):
            _check_numbers([left, right])
        return super().call_binop(context, operator, left, right)

    def _count(self) -> None:
        self._local.operations += 1
        if self._local.operations > MAX_OPERATIONS:
            raise TemplateLimitExceeded(f"it loops and calls more than {MAX_OPERATIONS:,} times")

    def _limit_filter(self, filter: Any) -> Any:
        def limited(*arguments: Any, **named: Any) -> Any:
            _check_numbers([*arguments, *named.values()])
            return filter(*arguments, **named)

        limited.__dict__.update(vars(filter))  # Jinja's mark for filters that take the environment
        return limited


def _check_numbers(values: Iterable[Any]) -> None:
    """Raise an error for a large number: text repeated or padded by it would fill the memory at once."""
    for value in values:
        if isinstance(value, (int, float)) and abs(value) > MAX_OPERATIONS:
            raise TemplateLimitExceeded(f"it calculates with a number above {MAX_OPERATIONS:,}")


def _size(values: Collection[Any]) -> float:
    """Return the number of characters and items, plus the numbers: a template may loop or pad that far."""
    numbers = (min(abs(v), 10**9) for v in values if isinstance(v, (int, float)))
    return sum(numbers) + sum(len(v) for v in values if hasattr(v, "__len__"))


def read_template(path: str) -> str:
    return regular_file(Path(path).expanduser()).read_text(encoding="utf-8").strip()


def load_template(path: str | None) -> PromptTemplate | None:
    """Load a template. It sees the row's columns, and the prompt as `content`; a missing column is false and empty."""
    if path is None:
        return None
    try:
        return PromptTemplate(read_template(path), path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"dataset.format_prompt {path} cannot be read: {reason}") from error
    except (jinja2.TemplateError, RecursionError) as error:
        raise DataError(f"dataset.format_prompt {path} is not a Jinja template: {error}") from error
