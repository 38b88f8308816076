"""Reward models: classify a whole conversation with one label.

Text: any checkpoint that `AutoModelForSequenceClassification` loads; the model knows which token holds its score.
Images: transformers has no such class for Qwen's vision-language families, so a checkpoint is the published backbone
with a `score.weight` [1, hidden] in its safetensors (the layout of ms-swift); the last token holds its score.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForImageTextToText, AutoModelForSequenceClassification, PreTrainedModel

from mtrl.models.backbone import Backbone, prompt_positions, vision_tokens
from mtrl.models.checkpoint_files import check_weight_files
from mtrl.models.families import VISION_FAMILIES, load_encoder, load_model_config, load_tokenizer
from mtrl.models.families.text import TextEncoder, content_parts
from mtrl.models.layout import continue_positions
from mtrl.models.load_model import DTYPES, build_empty, from_pretrained
from mtrl.models.parallel.fsdp import Sharding, compute_device, reshard, run_forward
from mtrl.models.parallel.ranks import SINGLE_PROCESS, Ranks
from mtrl.models.value_head import HEAD, OUTPUT_MATRIX, attach_head, empty_value_model, find_head
from mtrl.types import TEXT_POOL, Prompt, Task
from mtrl.utils.images import resize_image

NO_GENERATION_PROMPT = "{% set add_generation_prompt = false %}"  # before a template: the answer is there already


class RewardModel(ABC):
    """Encodes a response as its reward model reads it, and scores conversations in one pass."""

    def __init__(self, model: PreTrainedModel, encoder: TextEncoder) -> None:
        self.encoder, self.max_tokens = encoder, find_max_tokens(model, encoder)
        if encoder.chat_template is not None:
            encoder.chat_template = NO_GENERATION_PROMPT + encoder.chat_template

    @abstractmethod
    def resize_images(self, media: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """A prompt's images in the sizes of this model."""

    @abstractmethod
    def scores(self, conversations: Sequence[Prompt]) -> Tensor:
        """One score per conversation: [N] float32, on the CPU. Ranks that hold the model together call it at once."""

    def encode(self, task: Task, media: Sequence[np.ndarray], response: str) -> Prompt:
        """Encode prompt and response in the reward model's chat template; without one, concatenate their texts. Raises
        a ValueError that says why they cannot be scored."""
        if self.encoder.chat_template is not None:
            messages = (*task.messages, {"role": "assistant", "content": response})
        else:
            *before, last = task.messages
            messages = (*before, {**last, "content": [*content_parts(last), {"type": "text", "text": response}]})
        conversation = self.encoder.encode(replace(task, messages=messages), media)
        if (length := len(conversation.ids)) > self.max_tokens:
            raise ValueError(f"prompt and response have {length} tokens; the reward model reads {self.max_tokens}")
        return conversation

    def dummy_conversation(self) -> Prompt:
        """A conversation of one token, for a rank without conversations."""
        one = torch.tensor([self.encoder.pad_id])
        return Prompt(Task("", "", ()), (), one, one, torch.full((1,), TEXT_POOL))


def load_reward_model(
    path: str,
    *,
    dtype: str = "fp32",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    sharding: Sharding | None = None,
) -> RewardModel:
    """Load a reward model with its own tokenizer and image settings from a directory or hub id, onto one device or
    sharded over ranks, which all load it at once."""
    config = load_model_config(path, trust_remote_code)
    check_weight_files(path)
    options: dict[str, Any] = {"dtype": DTYPES[dtype], "trust_remote_code": trust_remote_code}
    if config.model_type in VISION_FAMILIES:
        encoder = load_encoder(path, trust_remote_code=trust_remote_code)
        load = partial(load_with_head, path, **options)
        if sharding is None:
            return VisionRewardModel(load().to(device), encoder)
        empty: Any = empty_value_model(path, dtype=dtype, trust_remote_code=trust_remote_code)
        return VisionRewardModel(sharding.load_sharded(empty, load).requires_grad_(False), encoder, sharding.ranks)
    tokenizer = TextEncoder(load_tokenizer(path, trust_remote_code))
    load = partial(load_frozen, AutoModelForSequenceClassification, path, num_labels=1, **options)
    if sharding is None:
        return TextRewardModel(load().to(device), tokenizer)
    config.num_labels = 1
    empty = build_empty(AutoModelForSequenceClassification, config, **options)
    return TextRewardModel(sharding.load_sharded(empty, load).requires_grad_(False), tokenizer)


class TextRewardModel(RewardModel):
    """Reads the text of a conversation; images are left out."""

    def __init__(self, model: PreTrainedModel, encoder: TextEncoder) -> None:
        super().__init__(model, encoder)
        self.model = model
        model.config.get_text_config().pad_token_id = encoder.pad_id  # its score is at the token before the padding

    def resize_images(self, media: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return ()

    def encode(self, task: Task, media: Sequence[np.ndarray], response: str) -> Prompt:
        return super().encode(remove_media(task), (), response)

    @torch.no_grad()
    def scores(self, conversations: Sequence[Prompt]) -> Tensor:
        rows, device = [each.ids for each in conversations], compute_device(self.model)
        ids = pad_sequence(rows, batch_first=True, padding_value=self.encoder.pad_id)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        scores = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits[:, 0].float().cpu()
        reshard(self.model)
        return scores


class VisionRewardModel(RewardModel):
    """Reads the images too: those of a prompt once for all its responses in a pass."""

    def __init__(self, model: PreTrainedModel, encoder: TextEncoder, ranks: Ranks = SINGLE_PROCESS) -> None:
        super().__init__(model, encoder)
        self.backbone = Backbone(model, ranks=ranks)

    def resize_images(self, media: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """To this model's multiple of patches; the policy's may differ."""
        if any(array.ndim != 3 for array in media):
            raise ValueError("reward models take no videos yet")
        return [resize_image(array, *self.encoder.target_size(*array.shape[:2])) for array in media]

    @torch.no_grad()
    def scores(self, conversations: Sequence[Prompt]) -> Tensor:
        return run_forward(self.backbone.model, partial(self._scores, conversations))

    def _scores(self, conversations: Sequence[Prompt]) -> Tensor:
        device = self.backbone.device
        keys = [make_image_key(each) for each in conversations]
        inputs = {key: self.encoder.inputs(each) for key, each in dict(zip(keys, conversations, strict=True)).items()}
        features = dict(zip(inputs, self.backbone.encode_images(list(inputs.values())), strict=True))
        positions = [
            fit_positions(prompt_positions(inputs[key]), len(each.ids)).T
            for key, each in zip(keys, conversations, strict=True)
        ]
        hidden = self.backbone.forward_text(
            pad_sequence([each.ids for each in conversations], batch_first=True).to(device),
            pad_sequence(positions, batch_first=True).permute(2, 0, 1).to(device),
            pad_sequence([vision_tokens(each) for each in conversations], batch_first=True),
            [features[key] for key in keys],
        )
        last = torch.tensor([len(each.ids) - 1 for each in conversations], device=device)
        final = hidden[torch.arange(len(last), device=device), last]
        return (final.float() @ self.backbone.output_matrix.float().T)[:, 0].cpu()


# ------------------------------------------------------------------------------------------------------------- loading
def load_frozen(kind: Any, path: str, unused: str | None = None, **options: Any) -> Any:
    """Load a frozen model. Raises a ValueError for a model without a head, with several labels or with missing weights
    except `unused`, which transformers would fill with random numbers."""
    try:
        model, report = from_pretrained(kind, path, **options)
    except ValueError as error:
        raise ValueError(f"{path} is no reward model: {error}") from error
    wrong = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])} - {unused})
    if wrong:
        raise ValueError(
            f"{path} is no reward model with one label: {', '.join(wrong)} is missing or of another size; a reward is "
            "one number, so it must be a sequence classifier with num_labels=1"
        )
    return model.eval().requires_grad_(False)


def load_with_head(path: str, **options: Any) -> Any:
    """Load a frozen vision-language backbone with the score head of its checkpoint."""
    head = find_head(path)
    if head is None or head.dim() != 2 or len(head) != 1:
        raise ValueError(
            f"{path} is no reward model with one label: its safetensors must hold {HEAD} [1, hidden] next to the "
            f"backbone, and {'there is none' if head is None else f'it is {list(head.shape)}'}"
        )
    model = load_frozen(AutoModelForImageTextToText, path, unused=OUTPUT_MATRIX, **options)
    return attach_head(model, head).requires_grad_(False)


# ------------------------------------------------------------------------------------------------------- conversations
def remove_media(task: Task) -> Task:
    """The text of a task."""
    messages = tuple(
        {**message, "content": "".join(part.get("text", "") for part in content_parts(message))}
        for message in task.messages
    )
    return replace(task, messages=messages, media=())


def find_max_tokens(model: PreTrainedModel, encoder: TextEncoder) -> int:
    """The most tokens that model and tokenizer take."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(min(limit for limit in (encoder.tokenizer.model_max_length, positions) if limit is not None))


def make_image_key(conversation: Prompt) -> tuple[Any, ...]:
    """A key that is equal for the same images at the same positions: responses to a prompt share their arrays."""
    positions = vision_tokens(conversation).nonzero().flatten()
    return (*map(id, conversation.media), positions.numpy().tobytes())


def fit_positions(positions: Tensor, length: int) -> Tensor:
    """[3, length]: positions of a conversation that differs from the one of `positions` only after the last image."""
    return continue_positions(positions, [max(0, length - positions.shape[1])])[:, :length]
