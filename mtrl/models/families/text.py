"""Encode a task as tokens: the part that text models and vision-language models share."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple

import jinja2
import numpy as np
import torch
from tokenizers import Encoding, Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mtrl.models.families.message_parts import check_marks, content_parts, system_spans
from mtrl.models.families.shown_tools import ShownTools, find_place
from mtrl.models.families.tool_messages import MessageForm, Role, drop_first, find_form, make_readable
from mtrl.models.families.written_tokens import Placeholders, WrittenTokens
from mtrl.protocols import Clip, ImageSettings, Schema, VideoSettings
from mtrl.types import NO_POOL, TEXT_POOL, Medium, Prompt, Task
from mtrl.utils.images import resize_image

ENCODING_VERSION = 2  # part of the fingerprint: raise it when the same settings give other tokens or pools

NO_VIDEOS = "this model takes no videos"


class Rendered(NamedTuple):
    """A chat as one text, and its tokens. In messages and text, placeholders replace special tokens that a message
    spells out."""

    messages: Sequence[Mapping[str, Any]]
    text: str
    tokens: Encoding


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
    _tools = ShownTools()
    _image_token: str | None = None  # what a rendered chat has for an image

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
        self._special_tokens = WrittenTokens.from_tokenizer(tokenizer)
        self._written = self._special_tokens if not allow_special_tokens else WrittenTokens(())
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
        return len(self._tokens(task, len(sizes)).tokens.ids)

    def encode(self, task: Task, media: Sequence[np.ndarray]) -> Prompt:
        return self._make_prompt(task, media, self._tokens(task, len(media)))

    def inputs(
        self, prompt: Prompt, media: Sequence[np.ndarray] | None = None, device: torch.device | None = None
    ) -> dict[str, Tensor]:
        """Arguments of the model's forward in addition to the ids: position_ids [L]."""
        assert not media and not prompt.media, "a text model takes no images"
        return {"position_ids": torch.arange(len(prompt.ids))}

    # ------------------------------------------------------------------------------------------------- environments
    def with_tools(self, tools: Mapping[str, Sequence[Schema]]) -> TextEncoder:
        """A copy whose prompts describe the tools that a row's column `environment` names, or the same for every row
        if their name is empty."""
        encoder = copy(self)
        encoder.__dict__.pop("_fingerprint", None)
        encoder._tools = ShownTools({name: tuple(each) for name, each in tools.items()}, find_place(self.render))
        return encoder

    @property
    def tool_role(self) -> Role:
        return self._message_form.role

    def check_messages(self) -> None:
        self._find_message_form()

    def encode_message(self, content: Sequence[str | np.ndarray], after: int, id: str) -> Prompt:
        form, content = self._message_form, make_readable(content)
        images = [block for block in content if not isinstance(block, str)]
        images = [resize_image(image, *self.target_size(*image.shape[:2])) for image in images]
        media = tuple(Medium("image", None) for _ in images)
        placeholders = self._special_tokens.make_placeholders(content)
        message = form.message(placeholders.insert(content))
        text = form.write(self.render, message, str(self.tokenizer.convert_ids_to_tokens(after)))
        rendered = self._tokenize(media, [message], text, placeholders)
        task = Task(id, "environment", (form.message(content),), media)
        return drop_first(self._make_prompt(task, images, rendered), after)

    # ------------------------------------------------------------------------------------------------- what is drawn
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
    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Schema] = ()) -> str:
        """The chat as one text that ends where the answer begins; without a template one content per line. The template
        describes the tools."""
        if not messages:
            raise ValueError("the prompt is empty")
        if self.chat_template is None:
            return "\n".join("".join(self._part_text(part) for part in content_parts(message)) for message in messages)
        try:
            text = self.tokenizer.apply_chat_template(
                self._for_template(messages),
                tools=[dict(each) for each in tools] or None,
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

    def _tokens(self, task: Task, media_count: int) -> Rendered:
        """The prompt as the template writes it, one pad for each medium."""
        check_marks(task, media_count)
        schemas = self._tools.of(task)
        placeholders = self._written.make_placeholders((task.messages, schemas))
        schemas = placeholders.insert(schemas)
        messages = self._tools.place_in(placeholders.insert(task.messages), schemas)
        text = self.render(messages, schemas) if schemas and self._tools.place == "template" else self.render(messages)
        return self._tokenize(task.media, messages, text, placeholders)

    def _tokenize(
        self, media: Sequence[Medium], messages: Sequence[Mapping[str, Any]], text: str, placeholders: Placeholders
    ) -> Rendered:
        # A template writes its own special tokens; plain text gets what the tokenizer adds (a BOS, mostly none).
        add = self.chat_template is None
        try:
            if not placeholders:
                return Rendered(messages, text, self._backend.encode(text, add_special_tokens=add))
            pieces = [
                self._backend.encode(piece, add_special_tokens=False)
                if is_token
                else self._plain_tokenizer.encode(placeholders.remove(piece), add_special_tokens=False)
                for piece, is_token in self._special_tokens.split(text)
            ]
            tokens = self._backend.post_process(Encoding.merge(pieces), add_special_tokens=add)
            return Rendered(messages, text, tokens)
        except TypeError as error:  # JSON can contain half a surrogate pair, which no tokenizer takes
            raise ValueError("the prompt is not valid Unicode text") from error

    def _make_prompt(self, task: Task, media: Sequence[np.ndarray], rendered: Rendered) -> Prompt:
        ids = torch.tensor(rendered.tokens.ids, dtype=torch.long)
        return Prompt(task, (), ids, ids, self._text_pool(rendered))

    def _text_pool(self, rendered: Rendered) -> Tensor:
        tokens = rendered.tokens
        pool = torch.full((len(tokens.ids),), TEXT_POOL, dtype=torch.long)
        if not self._pool_special:
            pool[torch.isin(torch.tensor(tokens.ids), self._special_ids)] = NO_POOL
        if not self._pool_system:
            starts, ends = torch.tensor(tokens.offsets, dtype=torch.long).view(-1, 2).unbind(1)
            for begin, end in system_spans(rendered.text, rendered.messages):
                pool[(ends > begin) & (starts < end)] = NO_POOL
        return pool

    def _find_message_form(self) -> MessageForm:
        return find_form(self.chat_template, self.render, self._image_token)

    @cached_property
    def _message_form(self) -> MessageForm:
        return self._find_message_form()

    def _settings(self) -> list[Any]:
        """Everything that `length` and `encode` depend on, except the tokenizer."""
        pools = [self._pool_special, self._pool_system]
        tools = [self._tools.schemas] if any(self._tools.schemas.values()) else []
        return [ENCODING_VERSION, type(self).__name__, self.chat_template, *pools, not self._written.tokens, *tools]

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


def _find_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The tokenizer's own template (the default one if it has several)."""
    return tokenizer.get_chat_template() if tokenizer.chat_template else None
