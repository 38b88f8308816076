"""Special tokens that a message spells out are ordinary text, which must not end or begin a turn.

While a chat template is rendered they are replaced by placeholders, characters that no text uses, one for each
character. So every special token in the result comes from the template, and every offset in the text stays the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

PRIVATE = range(0xF0000, 0x10FFFE)  # Unicode's private use area


@dataclass(frozen=True)
class WrittenTokens:
    """`tokens`: content, and whether the tokenizer strips whitespace before and after it."""

    tokens: tuple[tuple[str, bool, bool], ...]

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase) -> WrittenTokens:
        special = [token for token in tokenizer.added_tokens_decoder.values() if token.special and token.content]
        longest_first = sorted(special, key=lambda token: (-len(token.content), token.content))
        return cls(tuple((token.content, token.lstrip, token.rstrip) for token in longest_first))

    def make_placeholders(self, messages: Any) -> Placeholders:
        """Placeholders for these messages; empty if they spell out no special token."""
        texts = list(iter_strings(messages))
        if self.tokens and any(map(self._pattern.search, texts)):
            used = set().union(*texts)
            count = len(self.tokens)
            first = next(at for at in PRIVATE[::count] if not any(chr(at + i) in used for i in range(count)))
            return Placeholders(
                {content: chr(first + i) for i, (content, _, _) in enumerate(self.tokens)}, self._pattern
            )
        return Placeholders({}, self._pattern)

    def find(self, text: str) -> list[str]:
        return list(dict.fromkeys(self._pattern.findall(text))) if self.tokens else []

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """The text in pieces, and whether each is a special token."""
        for index, piece in enumerate(self._splitter.split(text)):
            if piece:
                yield piece, index % 2 == 1

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(content) for content, _, _ in self.tokens))

    @cached_property
    def _splitter(self) -> re.Pattern[str]:
        spelled = (
            (r"\s*" if left else "") + re.escape(content) + (r"\s*" if right else "")
            for content, left, right in self.tokens
        )
        return re.compile(f"({'|'.join(spelled)})")


@dataclass(frozen=True)
class Placeholders:
    """The character that replaces each character of a special token."""

    characters: Mapping[str, str]
    pattern: re.Pattern[str]

    def __bool__(self) -> bool:
        return bool(self.characters)

    def insert(self, value: Any) -> Any:
        """The messages with placeholders in every string."""
        if not self.characters:
            return value
        if isinstance(value, str):
            return self.pattern.sub(lambda match: self.characters[match[0]] * len(match[0]), value)
        if isinstance(value, Mapping):
            return {self.insert(name): self.insert(item) for name, item in value.items()}
        return [self.insert(item) for item in value] if isinstance(value, (list, tuple)) else value

    def remove(self, text: str) -> str:
        """Inverse of `insert` for one text."""
        for content, character in self.characters.items():
            text = text.replace(character * len(content), content)
        if any(character in text for character in self.characters.values()):
            raise ValueError("the chat template cuts a special token that the text spells out")
        return text


def iter_strings(value: Any) -> Iterator[str]:
    """Every string in messages or schemas: a template may write any of them, names of arguments too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from iter_strings(name)
            yield from iter_strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from iter_strings(item)
