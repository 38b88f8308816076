"""Encode a task as tokens: the part that text models and vision-language models share."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
import numpy as np
import torch
from tokenizers import Encoding, Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mtrl.models.families.written_tokens import WrittenTokens
from mtrl.protocols import Clip, ImageSettings, VideoSettings
from mtrl.types import NO_POOL, TEXT_POOL, Prompt, Task

ENCODING_VERSION = 2  # part of the fingerprint: raise it when the same settings give other tokens or pools

NO_VIDEOS = "this model takes no videos"
CHATML_SYSTEM = re.compile(r"<\|im_start\|>system\n.*?(?=<\|im_start\|>|\Z)", re.DOTALL)


class TextEncoder:
    """A PromptEncoder for text models. Holds no state between calls; can be pickled to worker processes.

    The text pool of a prompt (attention grounding) leaves out special tokens and the system segment;
    `pool_special_tokens` and `pool_system` include them.

    A special token that a message spells out (`<|im_end|>`) is text: only the chat template ends a turn.
    `allow_special_tokens` makes it the token.
    """

    image_settings: ImageSettings | None = None  # a text model takes none
    video_settings = VideoSettings()
    forbidden_ids: tuple[int, ...] = ()

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        stop_ids: Sequence[int] = (),
        pool_special_tokens: bool = False,
        pool_system: bool = False,
        allow_special_tokens: bool = False,
    ) -> None:
        if not tokenizer.is_fast:
            raise ValueError(f"{type(tokenizer).__name__} is a slow tokenizer; MTRL needs one with a tokenizer.json")
        self.tokenizer = tokenizer
        self.chat_template = chat_template or _find_template(tokenizer)
        self.stop_ids: tuple[int, ...] = tuple(stop_ids)
        if not self.stop_ids and tokenizer.eos_token_id is not None:
            self.stop_ids = (tokenizer.eos_token_id,)
        pad_id = tokenizer.pad_token_id
        self.pad_id: int = pad_id if pad_id is not None else (*self.stop_ids, 0)[0]
        self._pool_special, self._pool_system = pool_special_tokens, pool_system
        added = tokenizer.added_tokens_decoder.items()
        self._special_ids = torch.tensor(sorted({*tokenizer.all_special_ids, *(i for i, t in added if t.special)}))
        # The Rust tokenizer itself: no padding, no truncation, no warnings about long texts, and twice as fast.
        self._backend = tokenizer.backend_tokenizer
        self._written = WrittenTokens.from_tokenizer(tokenizer) if not allow_special_tokens else WrittenTokens(())
        self._backend.no_padding()
        self._backend.no_truncation()

    # ------------------------------------------------------------------------------------------------ PromptEncoder
    def fingerprint(self) -> str:
        return self._fingerprint

    def target_size(self, height: int, width: int) -> tuple[int, int]:
        raise ValueError("this is a text model; it takes no images")

    def frame_size(self, height: int, width: int) -> tuple[int, int]:
        raise ValueError(NO_VIDEOS)

    def clip(self, total: int, fps: float) -> Clip:
        raise ValueError(NO_VIDEOS)

    def length(self, task: Task, sizes: Sequence[tuple[int, int]]) -> int:
        """Tokens of the prompt. `sizes` are those of the media before the resize to `target_size`."""
        return len(self._tokens(task, len(sizes))[1].ids)

    def encode(self, task: Task, media: Sequence[np.ndarray]) -> Prompt:
        text, tokens = self._tokens(task, len(media))
        ids = torch.tensor(tokens.ids, dtype=torch.long)
        return Prompt(task, (), ids, ids, self._text_pool(task, text, tokens))

    def inputs(
        self, prompt: Prompt, media: Sequence[np.ndarray] | None = None, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """Arguments of the model's forward in addition to the ids: position_ids [L]."""
        assert not media and not prompt.media, "a text model takes no images"
        return {"position_ids": torch.arange(len(prompt.ids))}

    def find_written_tokens(self, text: str) -> list[str]:
        """The special tokens that a text spells out; the model reads them as text."""
        return self._written.find(text)

    def largest_image(self, tokens: int) -> tuple[int, int]:
        """(height, width) of an image at its target size with so many tokens, or the most that an image can have."""
        assert self.image_settings is not None, "a text model takes no images"
        rows = math.isqrt(tokens)
        return rows * self.image_settings.factor, tokens // rows * self.image_settings.factor

    def visible_part(self, medium: np.ndarray) -> np.ndarray:
        """The part of a medium at its target size that the model sees."""
        return medium

    def pictures(self, medium: np.ndarray) -> list[np.ndarray]:
        """What is drawn of a medium: the visible part as grids of its tokens, one after the other."""
        return [self.visible_part(medium)]

    def engine_image_arguments(self) -> dict[str, Any]:
        """Arguments for transformers' image processor in an engine, so that it computes the trainer's pixels."""
        return {}

    # ------------------------------------------------------------------------------------------------- back to text
    def decode(self, ids: Sequence[int] | Tensor) -> str:
        """The text of a response, without special tokens."""
        return self._backend.decode(list_ids(ids), skip_special_tokens=True)

    def decode_tokens(self, ids: Sequence[int] | Tensor) -> list[str]:
        """One text per token, special tokens included: for token-by-token reports."""
        return [self._backend.decode([i], skip_special_tokens=False) for i in list_ids(ids)]

    # ------------------------------------------------------------------------------------------------------ helpers
    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The chat as one text that ends where the answer begins; without a template one content per line."""
        if not messages:
            raise ValueError("the prompt is empty")
        if self.chat_template is None:
            return "\n".join("".join(self._part_text(part) for part in content_parts(message)) for message in messages)
        try:
            text = self.tokenizer.apply_chat_template(
                self._for_template(messages),
                chat_template=self.chat_template,
                add_generation_prompt=True,
                tokenize=False,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        assert isinstance(text, str)
        return text

    def _for_template(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Templates of text models expect contents to be strings."""
        return [
            {**message, "content": "".join(self._part_text(part) for part in content_parts(message))}
            if isinstance(message.get("content"), (list, tuple))
            else dict(message)
            for message in messages
        ]

    def _part_text(self, part: Mapping[str, Any]) -> str:
        if part["type"] != "text":
            raise ValueError(f"this is a text model; the prompt has media ({part['type']})")
        return part["text"]

    def _tokens(self, task: Task, media_count: int) -> tuple[str, Encoding]:
        """The prompt's text and its tokens, one pad for each medium. In the text, placeholders replace special tokens
        that messages spell out."""
        check_marks(task, media_count)
        placeholders = self._written.make_placeholders(task.messages)
        text = self.render(placeholders.insert(task.messages))
        # A template writes its own special tokens; plain text gets what the tokenizer adds (a BOS, mostly none).
        add = self.chat_template is None
        try:
            if not placeholders:
                return text, self._backend.encode(text, add_special_tokens=add)
            pieces = [
                self._backend.encode(piece, add_special_tokens=False)
                if is_token
                else self._plain_tokenizer.encode(placeholders.remove(piece), add_special_tokens=False)
                for piece, is_token in self._written.split(text)
            ]
            return text, self._backend.post_process(Encoding.merge(pieces), add_special_tokens=add)
        except TypeError as error:  # JSON can contain half a surrogate pair, which no tokenizer takes
            raise ValueError("the prompt is not valid Unicode text") from error

    def _text_pool(self, task: Task, text: str, tokens: Encoding) -> Tensor:
        pool = torch.full((len(tokens.ids),), TEXT_POOL, dtype=torch.long)
        if not self._pool_special:
            pool[torch.isin(torch.tensor(tokens.ids), self._special_ids)] = NO_POOL
        if not self._pool_system:
            starts, ends = torch.tensor(tokens.offsets, dtype=torch.long).view(-1, 2).unbind(1)
            messages = self._written.make_placeholders(task.messages).insert(task.messages)
            for begin, end in system_spans(text, messages):
                pool[(ends > begin) & (starts < end)] = NO_POOL
        return pool

    def _settings(self) -> list[Any]:
        """Everything that `length` and `encode` depend on, except the tokenizer."""
        pools = [self._pool_special, self._pool_system]
        return [ENCODING_VERSION, type(self).__name__, self.chat_template, *pools, not self._written.tokens]

    @cached_property
    def _text_backend(self) -> Tokenizer:
        return Tokenizer.from_str(self._backend.to_str())

    @property
    def _plain_tokenizer(self) -> Tokenizer:
        """A tokenizer that takes special tokens for text: a copy, since other threads encode at the same time. Pickle
        loses the flag, so it is set on every access."""
        self._text_backend.encode_special_tokens = True
        return self._text_backend

    @cached_property
    def _fingerprint(self) -> str:
        settings = json.dumps(self._settings(), sort_keys=True) + self._backend.to_str()
        return hashlib.sha256(settings.encode()).hexdigest()[:16]


def list_ids(ids: Sequence[int] | Tensor) -> list[int]:
    """As Python numbers. One by one a tensor gives them slowly: the 262,144 tokens of a step took 1.1 s to decode, at
    once 0.2 s."""
    return ids.tolist() if isinstance(ids, Tensor) else [int(each) for each in ids]


def content_parts(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of a message: {"type": "text", "text": ..}, {"type": "image"} or {"type": "video"}."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"not a message (a role and a content): {message!r:.200}")
    content = message.get("content")
    if isinstance(content, str):
        yield {"type": "text", "text": content}
        return
    if content is not None and not isinstance(content, (list, tuple)):
        raise ValueError(f"the content of a message is a {type(content).__name__}; it must be text or a list of parts")
    for part in content or ():
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "image", "video") or (kind == "text" and not isinstance(part.get("text"), str)):
            raise ValueError(f"not a part of a message (a text with its text, an image or a video): {part!r:.200}")
        yield dict(part)


def check_marks(task: Task, media_count: int) -> None:
    """Check that messages, task and given media agree in number and kind of media."""
    marks = [part["type"] for message in task.messages for part in content_parts(message) if part["type"] != "text"]
    kinds = [medium.kind for medium in task.media]
    if not len(marks) == len(kinds) == media_count:
        media = "media" if "video" in (*marks, *kinds) else "images"
        raise ValueError(
            f"the messages have {len(marks)} {media.removesuffix('s')} marks, the row names {len(kinds)} {media} and "
            f"{media_count} were given; the three must be equal"
        )
    if marks != kinds:
        raise ValueError(f"the messages have marks of {', '.join(marks)}, the row's media are {', '.join(kinds)}")


def system_spans(text: str, messages: Iterable[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """(begin, end) of system segments in the rendered text: in ChatML (Qwen) the whole turn, also one that the template
    adds; elsewhere the text of system messages."""
    if spans := [match.span() for match in CHATML_SYSTEM.finditer(text)]:
        return spans
    for message in messages:
        if message.get("role") == "system":
            body = "".join(part.get("text", "") for part in content_parts(message)).strip()  # templates trim
            begin = text.find(body)
            if body and begin >= 0:
                spans.append((begin, begin + len(body)))
    return spans


def _find_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The tokenizer's own template (the default one if it has several)."""
    return tokenizer.get_chat_template() if tokenizer.chat_template else None
