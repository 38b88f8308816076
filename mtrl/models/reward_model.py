"""Reward models: sequence classification with one label, of a whole conversation.

Text: any checkpoint that `AutoModelForSequenceClassification` loads; the model itself knows where in the sequence its
score stands. Images: transformers has no such class for Qwen's vision-language families, so a checkpoint is the
backbone as it is published with a `score.weight` [1, hidden] in its safetensors (the layout that ms-swift writes); its
score stands at the last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from mtrl.models.backbone import Backbone, prompt_positions, vision_tokens
from mtrl.models.checkpoint_files import check_weight_files
from mtrl.models.families import VISION_FAMILIES, load_encoder, load_model_config, load_tokenizer
from mtrl.models.families.text import TextEncoder, content_parts
from mtrl.models.load_model import DTYPES, from_pretrained
from mtrl.models.parallel.fsdp import Sharding, compute_device, in_one_pass, split_again
from mtrl.models.parallel.ranks import SINGLE_PROCESS, Ranks
from mtrl.models.value_head import HEAD, OUTPUT_MATRIX, empty_value_model, find_head, with_head
from mtrl.types import TEXT_POOL, Prompt, Task

NOTHING_FOLLOWS = "{% set add_generation_prompt = false %}"  # before a template: the answer is there already


class RewardModel(Protocol):
    """Writes a response down as its reward model reads it, and scores some of them in one pass."""

    def fit(self, media: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """A prompt's images as this model sees them."""

    def encode(self, task: Task, media: Sequence[np.ndarray], response: str) -> Prompt:
        """The conversation with the response at its end. A ValueError says why it cannot be scored."""

    def blank(self) -> Prompt:
        """A conversation of one token, whose score says nothing."""

    def scores(self, conversations: Sequence[Prompt]) -> Tensor:
        """One score for each conversation: [N] float32, on the CPU. Ranks that hold the model together ask at once."""


def load_reward_model(
    path: str,
    *,
    dtype: str = "fp32",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    sharding: Sharding | None = None,
) -> RewardModel:
    """The reward model in a directory or behind a hub id, with its own tokenizer and image settings: whole on a device,
    or by `sharding` split over ranks, which all load it at once."""
    config = load_model_config(path, trust_remote_code)
    check_weight_files(path)
    options: dict[str, Any] = {"dtype": DTYPES[dtype], "trust_remote_code": trust_remote_code}
    if config.model_type in VISION_FAMILIES:
        encoder = load_encoder(path, trust_remote_code=trust_remote_code)
        load = partial(load_with_head, path, **options)
        if sharding is None:
            return VisionRewardModel(load().to(device), encoder)
        empty: Any = empty_value_model(path, dtype=dtype, trust_remote_code=trust_remote_code)
        return VisionRewardModel(sharding.spread(empty, load).requires_grad_(False), encoder, sharding.ranks)
    tokenizer = TextEncoder(load_tokenizer(path, trust_remote_code))
    load = partial(load_whole, AutoModelForSequenceClassification, path, num_labels=1, **options)
    if sharding is None:
        return TextRewardModel(load().to(device), tokenizer)
    config.num_labels = 1
    with torch.device("meta"):
        empty = AutoModelForSequenceClassification.from_config(config, **options).eval()
    return TextRewardModel(sharding.spread(empty, load).requires_grad_(False), tokenizer)


def blank_conversation(encoder: TextEncoder) -> Prompt:
    one = torch.tensor([encoder.pad_id])
    return Prompt(Task("", "", ()), (), one, one, torch.full((1,), TEXT_POOL))


class TextRewardModel:
    """Reads the words of a conversation; images are left out."""

    def __init__(self, model: PreTrainedModel, encoder: TextEncoder) -> None:
        self.model, self.encoder, self.limit = model, for_answered(encoder), longest(model, encoder)
        model.config.get_text_config().pad_token_id = encoder.pad_id  # its score stands before the padding

    def fit(self, media: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return ()

    def encode(self, task: Task, media: Sequence[np.ndarray], response: str) -> Prompt:
        return encode_answered(self.encoder, self.limit, special_words(task), (), response)

    def blank(self) -> Prompt:
        return blank_conversation(self.encoder)

    @torch.no_grad()
    def scores(self, conversations: Sequence[Prompt]) -> Tensor:
        rows, device = [each.ids for each in conversations], compute_device(self.model)
        ids = pad_sequence(rows, batch_first=True, padding_value=self.encoder.pad_id)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        found = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits[:, 0].float().cpu()
        split_again(self.model)
        return found


class VisionRewardModel:
    """Sees the images too: those of a prompt once for all its responses in a pass."""

    def __init__(self, model: PreTrainedModel, encoder: TextEncoder, ranks: Ranks = SINGLE_PROCESS) -> None:
        self.backbone = Backbone(model, ranks=ranks)
        self.encoder, self.limit = for_answered(encoder), longest(model, encoder)

    def fit(self, media: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return [resized(array, *self.encoder.target_size(*array.shape[-3:-1])) for array in media]

    def encode(self, task: Task, media: Sequence[np.ndarray], response: str) -> Prompt:
        return encode_answered(self.encoder, self.limit, task, media, response)

    def blank(self) -> Prompt:
        return blank_conversation(self.encoder)

    @torch.no_grad()
    def scores(self, conversations: Sequence[Prompt]) -> Tensor:
        return in_one_pass(self.backbone.model, partial(self._scores, conversations))

    def _scores(self, conversations: Sequence[Prompt]) -> Tensor:
        device = self.backbone.device
        owner = [decode_images(each) for each in conversations]
        seen = dict(zip(owner, conversations, strict=True))
        inputs = {images: self.encoder.inputs(each) for images, each in seen.items()}
        features = dict(zip(inputs, self.backbone.encode_images(list(inputs.values())), strict=True))
        positions = [
            counted_on(prompt_positions(inputs[images]), len(each.ids)).T
            for images, each in zip(owner, conversations, strict=True)
        ]
        hidden = self.backbone.forward_text(
            pad_sequence([each.ids for each in conversations], batch_first=True).to(device),
            pad_sequence(positions, batch_first=True).permute(2, 0, 1).to(device),
            pad_sequence([vision_tokens(each) for each in conversations], batch_first=True).to(device),
            [features[images] for images in owner],
        )
        last = torch.tensor([len(each.ids) - 1 for each in conversations], device=device)
        answers = hidden[torch.arange(len(last), device=device), last]
        return (answers.float() @ self.backbone.output_matrix.float().T)[:, 0].cpu()


# ------------------------------------------------------------------------------------------------------------- loading
def load_whole(kind: Any, path: str, unused: str | None = None, **options: Any) -> Any:
    """The frozen model. Refuses what transformers would fill with random weights: a model without a head, with several
    labels, or in part. `unused` may be missing."""
    try:
        model, found = from_pretrained(kind, path, **options)
    except ValueError as error:
        raise ValueError(f"{path} is no reward model: {error}") from error
    wrong = sorted({*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])} - {unused})
    if wrong:
        raise ValueError(
            f"{path} is no reward model with one label: {', '.join(wrong)} is missing or of another size; a reward is "
            "one number, so it must be a sequence classifier with num_labels=1"
        )
    return model.eval().requires_grad_(False)


def load_with_head(path: str, **options: Any) -> Any:
    """A backbone that sees, with the head of its checkpoint; frozen."""
    head = read_head(path)
    model = load_whole(AutoModelForImageTextToText, path, unused=OUTPUT_MATRIX, **options)
    return with_head(model, head).requires_grad_(False)


def read_head(path: str) -> Tensor:
    """The score head [1, hidden] in the safetensors of a local or hub checkpoint."""
    head = find_head(path)
    if head is None or head.dim() != 2 or len(head) != 1:
        raise ValueError(
            f"{path} is no reward model with one label: its safetensors must hold {HEAD} [1, hidden] beside the "
            f"backbone, and {'there is none' if head is None else f'it is {list(head.shape)}'}"
        )
    return head


# ------------------------------------------------------------------------------------------------------- conversations
def for_answered(encoder: TextEncoder) -> TextEncoder:
    """The encoder, for conversations that end with the answer: its template must not ask for another one."""
    if encoder.chat_template is not None:
        encoder.chat_template = NOTHING_FOLLOWS + encoder.chat_template
    return encoder


def encode_answered(encoder: TextEncoder, limit: int, task: Task, media: Sequence[np.ndarray], response: str) -> Prompt:
    """Prompt and response as one conversation in the reward model's chat template; without one, their texts end to
    end."""
    if encoder.chat_template is not None:
        messages = (*task.messages, {"role": "assistant", "content": response})
    else:
        *before, last = task.messages
        messages = (*before, {**last, "content": [*content_parts(last), {"type": "text", "text": response}]})
    conversation = encoder.encode(replace(task, messages=messages), media)
    if len(conversation.ids) > limit:
        raise ValueError(f"prompt and response have {len(conversation.ids)} tokens; the reward model reads {limit}")
    return conversation


def special_words(task: Task) -> Task:
    """The task without its media."""
    messages = tuple(
        {**message, "content": "".join(part.get("text", "") for part in content_parts(message))}
        for message in task.messages
    )
    return replace(task, messages=messages, media=())


def longest(model: PreTrainedModel, encoder: TextEncoder) -> int:
    """The most tokens that model and tokenizer are made for."""
    limits = (
        encoder.tokenizer.model_max_length,
        getattr(model.config.get_text_config(), "max_position_embeddings", None),
    )
    return int(min(limit for limit in limits if limit is not None))


def resized(array: np.ndarray, height: int, width: int) -> np.ndarray:
    """An image at this model's own multiple of patches; the policy's may be another."""
    if array.ndim != 3:
        raise ValueError("reward models take no videos yet")
    if array.shape[:2] == (height, width):
        return array
    return np.asarray(Image.fromarray(array).resize((width, height), Image.Resampling.BICUBIC))


def decode_images(conversation: Prompt) -> tuple[Any, ...]:
    """A key that is equal for the same images at the same places: responses to a prompt hold the same arrays."""
    places = vision_tokens(conversation).nonzero().flatten()
    return (*map(id, conversation.media), places.numpy().tobytes())


def counted_on(positions: Tensor, length: int) -> Tensor:
    """[3, length]: the positions of a conversation that differs from this one's [3, L] only after the last image."""
    following = torch.arange(max(0, length - positions.shape[1])) + positions.max() + 1
    return torch.cat([positions, following.expand(3, -1)], dim=1)[:, :length]
