"""A small tokenizer with Qwen's special tokens and chat format, and image settings, for checkpoints made here.

It is a byte-level BPE trained on the word list below; all families share it.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import GenerationConfig, Qwen2Tokenizer

VOCABULARY = 512  # most tokens; the embedding has a row for each

SPECIAL_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip

WORDS = (
    "the a of and to in is it on for with as at by from what which where how many much colour shape size object "
    "picture image left right above below behind front near far red green blue yellow black white round square circle "
    "triangle count describe explain answer question reason step think first second third number total table chair "
    "dog cat car tree house road sky water person hand face book cup bottle street sign light window door floor wall "
    "system user assistant you are helpful not this that there be option choice final than more less equal sum"
)

# Qwen2-VL and Qwen2.5-VL add a system message if the chat has none; Qwen3-VL does not.
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
)
TURNS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(
    default_system: bool = True,
    words: str = WORDS,
    added_tokens: tuple[str, ...] = (),
    vocabulary: int = VOCABULARY,
) -> Qwen2Tokenizer:
    """Qwen's tokenizer class and special tokens over a small vocabulary."""
    vocab, merges = _trained_vocabulary(words, added_tokens, vocabulary)
    tokenizer = Qwen2Tokenizer(
        vocab=dict(vocab), merges=list(merges), eos_token="<|im_end|>", pad_token="<|endoftext|>",
        model_max_length=32768, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added_tokens])
    tokenizer.chat_template = DEFAULT_SYSTEM + TURNS if default_system else TURNS
    return tokenizer


@lru_cache(maxsize=4)
def _trained_vocabulary(words: str, added_tokens: tuple[str, ...], vocabulary: int) -> tuple[dict[str, int], list[Any]]:
    """A byte-level BPE of the word list: whole words with a leading space, and every byte."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=vocabulary - len(SPECIAL_TOKENS) - len(added_tokens),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f" {words}"], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
    vocab |= {token: len(vocab) + i for i, token in enumerate([*SPECIAL_TOKENS, *added_tokens])}
    return vocab, [tuple(merge) for merge in model["merges"]]


MEDIA_TOKENS = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}


def media_token_ids(tokenizer: Any) -> dict[str, int]:
    """The ids of the tokens around and in place of media, under their names in a config."""
    return {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in MEDIA_TOKENS.items()}


def end_token_ids(tokenizer: Any) -> tuple[int, int]:
    """The ids of the end of a turn and of a text; the latter also pads."""
    end, pad = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>"))
    return end, pad


def make_generation_config(tokenizer: Any) -> GenerationConfig:
    end, pad = end_token_ids(tokenizer)
    return GenerationConfig(eos_token_id=[end, pad], pad_token_id=pad, do_sample=True)


def write_image_settings(directory: Path, family: str, patch: int, low: int | None, high: int | None) -> None:
    """Write preprocessor_config.json with the keys of the family's published checkpoints."""
    token_area = (2 * patch) ** 2
    low, high = low or 4 * token_area, high or 1280 * token_area
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}.get(family, "Qwen3VL")
    settings: dict[str, Any] = {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": f"{name}Processor",
        "patch_size": patch, "temporal_patch_size": 2, "merge_size": 2,
    }  # fmt: skip
    if family.startswith("qwen3"):
        settings |= {"size": {"shortest_edge": low, "longest_edge": high}}
        settings |= {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    else:
        settings |= {"min_pixels": low, "max_pixels": high}
        settings |= {"image_mean": [0.48145466, 0.4578275, 0.40821073]}
        settings |= {"image_std": [0.26862954, 0.26130258, 0.27577711]}
    (directory / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n")
