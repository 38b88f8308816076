"""Special tokens that a message spells out: text like any other, which must not end a turn or begin one.

While a chat template is rendered they are veiled by characters that no text uses, one for each character, so that what
is a special token afterwards is the template's own, and every place in the text stays the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

PRIVATE = range(0xF0000, 0x10FFFE)  # characters without a meaning: Unicode leaves them to whoever wants them


@dataclass(frozen=True)
class WrittenTokens:
    """`tokens`: content, and whether the tokenizer strips the blanks before and after it."""

    tokens: tuple[tuple[str, bool, bool], ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> WrittenTokens:
        special = [token for token in tokenizer.added_tokens_decoder.values() if token.special and token.content]
        longest_first = sorted(special, key=lambda token: (-len(token.content), token.content))
        return cls(tuple((token.content, token.lstrip, token.rstrip) for token in longest_first))

    def veil(self, messages: Any) -> Veil:
        """The veil for these messages; empty where they spell out no special token."""
        texts = list(strings_in(messages))
        if self.tokens and any(map(self._pattern.search, texts)):
            used = set().union(*texts)
            count = len(self.tokens)
            first = next(at for at in PRIVATE[::count] if not any(chr(at + i) in used for i in range(count)))
            return Veil({content: chr(first + i) for i, (content, _, _) in enumerate(self.tokens)}, self._pattern)
        return Veil({}, self._pattern)

    def found_in(self, text: str) -> list[str]:
        return list(dict.fromkeys(self._pattern.findall(text))) if self.tokens else []

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """The text in pieces, and whether each is a special token."""
        for place, piece in enumerate(self._parted.split(text)):
            if piece:
                yield piece, place % 2 == 1

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(content) for content, _, _ in self.tokens))

    @cached_property
    def _parted(self) -> re.Pattern[str]:
        spelled = (
            (r"\s*" if left else "") + re.escape(content) + (r"\s*" if right else "")
            for content, left, right in self.tokens
        )
        return re.compile(f"({'|'.join(spelled)})")


@dataclass(frozen=True)
class Veil:
    """The character that stands for each special token, as often as the token has characters."""

    signs: Mapping[str, str]
    pattern: re.Pattern[str]

    def __bool__(self) -> bool:
        return bool(self.signs)

    def over(self, value: Any) -> Any:
        """Messages with every special token veiled, wherever it stands."""
        if not self.signs:
            return value
        if isinstance(value, str):
            return self.pattern.sub(lambda found: self.signs[found[0]] * len(found[0]), value)
        if isinstance(value, Mapping):
            return {name: self.over(item) for name, item in value.items()}
        return [self.over(item) for item in value] if isinstance(value, (list, tuple)) else value

    def lifted(self, text: str) -> str:
        """The text as it was."""
        for content, sign in self.signs.items():
            text = text.replace(sign * len(content), content)
        if any(sign in text for sign in self.signs.values()):
            raise ValueError("the chat template cuts a special token that the text spells out")
        return text


def strings_in(value: Any) -> Iterator[str]:
    """Every string anywhere in the messages: a template may write any of them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from strings_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings_in(item)
