"""Make tiny random checkpoints of every model family, for tests and for trying a setup without a download.

    directory = make_tiny_checkpoint("tiny", "qwen3_vl")
    AutoModelForImageTextToText.from_pretrained(directory)

They have the layout of the published checkpoints (config, safetensors, tokenizer with Qwen's special tokens and chat
format, image settings, generation config) and about 300,000 parameters. The tokenizer is a byte-level BPE trained on
the word list below; all families share it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig, Qwen2Tokenizer

VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
TINY_FAMILIES = (*VISION_FAMILIES, "qwen2")

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


def make_tiny_checkpoint(
    directory: str | Path,
    family: str = "qwen2_5_vl",
    *,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    recurrent_head: int | None = None,
    vision_hidden: int = 64,
    vision_layers: int = 2,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    words: str = WORDS,
    added_tokens: Sequence[str] = (),
    vocabulary: int = VOCABULARY,
) -> Path:
    """Write a loadable Hugging Face directory with random weights; the same arguments give the same bytes.

    `layers` have attention; hybrid families have as many recurrent ones between them, whose heads are `recurrent_head`
    wide (None: as in attention). Pixel limits default to 4 and 1280 tokens per image. The tokenizer is trained on
    `words`, up to `vocabulary` tokens, and each of `added_tokens` is a single token. The caller's random state is not
    changed.
    """
    if family not in TINY_FAMILIES:
        raise ValueError(f"no tiny checkpoint for family {family!r}; there are {', '.join(TINY_FAMILIES)}")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer(not family.startswith("qwen3"), words, tuple(added_tokens), vocabulary)
    tokenizer.save_pretrained(directory)

    end, pad = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>"))
    text = _text_config(family, hidden, layers, heads, kv_heads, recurrent_head or hidden // heads)
    text |= {"vocab_size": len(tokenizer), "bos_token_id": pad, "eos_token_id": end}
    if family == "qwen2":
        config = AutoConfig.for_model(family, **text)
        loader: Any = AutoModelForCausalLM
    else:
        marks = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in _MARKS.items()}
        vision = _vision_config(family, hidden, vision_hidden, vision_layers)
        config = AutoConfig.for_model(family, text_config=text, vision_config=vision, tie_word_embeddings=True, **marks)
        loader = AutoModelForImageTextToText
        _write_image_settings(directory, family, vision["patch_size"], min_pixels, max_pixels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = loader.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=[end, pad], pad_token_id=pad, do_sample=True)
    model.save_pretrained(directory)
    return directory


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


_MARKS = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}


def _text_config(
    family: str, hidden: int, layers: int, heads: int, kv_heads: int, recurrent_head: int
) -> dict[str, Any]:  # fmt: skip
    half = hidden // heads // 2  # rotary pairs of a head, divided among time, height and width
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}
    if family.startswith("qwen3_5"):
        half //= 2  # half of a head has no rotary positions
        rope |= {"partial_rotary_factor": 0.5}
    if family.startswith("qwen3"):
        side = half * 20 // 64
        rope |= {"mrope_section": [half - 2 * side, side, side], "mrope_interleaved": True}
    elif family != "qwen2":
        side = half * 24 // 64
        rope |= {"mrope_section": [half - 2 * side, side, side]}
    config = {
        "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 32768,
        "rope_parameters": rope, "tie_word_embeddings": True, "use_cache": True,
    }  # fmt: skip
    if family.startswith("qwen3"):
        config |= {"head_dim": hidden // heads}
    if family.startswith("qwen3_5"):  # a recurrent layer before each one with attention
        widths = {f"linear_{name}_head_dim": recurrent_head for name in ("key", "value")}
        config |= {"linear_num_key_heads": kv_heads, "linear_num_value_heads": heads, **widths}
        config |= {"num_hidden_layers": 2 * layers, "layer_types": ["linear_attention", "full_attention"] * layers}
    if family == "qwen3_5_moe":
        config |= {"num_experts": 4, "num_experts_per_tok": 2}
        config |= {"moe_intermediate_size": hidden, "shared_expert_intermediate_size": hidden}
    return config


def _vision_config(family: str, hidden: int, vision_hidden: int, depth: int) -> dict[str, Any]:
    shared = {"depth": depth, "num_heads": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    if family == "qwen2_vl":  # its "hidden_size" is the width of the text model
        return shared | {"embed_dim": vision_hidden, "hidden_size": hidden, "mlp_ratio": 2, "patch_size": 14}
    shared |= {"hidden_size": vision_hidden, "intermediate_size": 2 * vision_hidden, "out_hidden_size": hidden}
    if family == "qwen2_5_vl":
        return shared | {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [depth - 1]}
    shared |= {"patch_size": 16, "num_position_embeddings": 256}
    return shared | ({"deepstack_visual_indexes": [0]} if family == "qwen3_vl" else {})


def _write_image_settings(directory: Path, family: str, patch: int, low: int | None, high: int | None) -> None:
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
