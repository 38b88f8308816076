"""The model families. `load_encoder` reads a checkpoint's tokenizer and image settings, never its weights.

Tokenizer and image settings are loaded separately: the combined processors of transformers need torchvision, and images
are resized once, by us, so trainer and generator see the same pixels.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from mtrl.models.checkpoint_files import (
    SETTINGS_FILES,
    TOKENIZER_FILES,
    base_path,
    check_files,
    find_checkpoint_file,
    read_checkpoint_json,
)
from mtrl.models.families.gemma3 import Gemma3Family
from mtrl.models.families.gemma4 import Gemma4Family
from mtrl.models.families.glm import GlmFamily, GlmMoeFamily
from mtrl.models.families.idefics import IdeficsFamily
from mtrl.models.families.internvl import InternVLFamily
from mtrl.models.families.model_family import ModelFamily as ModelFamily
from mtrl.models.families.model_family import TextFamily
from mtrl.models.families.onevision import OnevisionFamily
from mtrl.models.families.qwen_tower import Qwen35Family, QwenVLMoeFamily
from mtrl.models.families.qwen_tower import QwenVLFamily as QwenVLFamily
from mtrl.models.families.qwen_vl import QwenVLEncoder as QwenVLEncoder
from mtrl.models.families.text import TextEncoder as TextEncoder
from mtrl.models.families.undescribed import HOW_TO_ADD
from mtrl.models.families.undescribed import ProcessorEncoder as ProcessorEncoder
from mtrl.models.families.undescribed import ProcessorImageEncoder as ProcessorImageEncoder
from mtrl.models.families.undescribed import UndescribedFamily as UndescribedFamily
from mtrl.models.families.vision_encoder import VisionEncoder as VisionEncoder
from mtrl.protocols import VideoSettings
from mtrl.utils.files import check_regular_files
from mtrl.utils.plugins import PluginError

# Vision-language families by the `model_type` of their config.json. Users add their own by `register_family`; text-only
# models need none.
FAMILIES: dict[str, ModelFamily] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), QwenVLFamily()),
    "qwen3_vl_moe": QwenVLMoeFamily(),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), Qwen35Family()),
    "internvl": InternVLFamily(),
    "llava_onevision": OnevisionFamily(),
    "glm4v": GlmFamily(),
    "glm4v_moe": GlmMoeFamily(),
    **dict.fromkeys(("idefics3", "smolvlm"), IdeficsFamily()),
    "gemma3": Gemma3Family(),
    "gemma4": Gemma4Family(),
}
VISION_FAMILIES = FAMILIES.keys()  # a view, so it includes families that are added later
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
)


def load_encoder(
    model_path: str | Path,
    *,
    tokenizer_path: str | Path | None = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    video: VideoSettings | None = None,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
    pool_special_tokens: bool = False,
    pool_system: bool = False,
    allow_special_tokens: bool = False,
) -> TextEncoder:
    """The PromptEncoder of a checkpoint: a local directory or a hub id. Vision families have theirs in FAMILIES.

    Pixel limits default to the checkpoint's. `chat_template` is Jinja text or the path of a file with it.
    """
    model_path, tokenizer_path = str(model_path), str(tokenizer_path or model_path)
    config = load_model_config(model_path, trust_remote_code)
    check_known_family(config, model_path)
    family = find_family(config)
    check_files(model_path, SETTINGS_FILES)
    check_no_pipes(tokenizer_path)
    tokenizer = load_tokenizer(tokenizer_path, trust_remote_code)
    template = _read_template(chat_template)
    has_images = is_vision_model(config)
    if has_images and template is None:  # older checkpoints; transformers' processors prefer this file to the tokenizer
        template = read_checkpoint_json(tokenizer_path, "chat_template.json").get("chat_template")
    options: dict[str, Any] = {
        "chat_template": template,
        "stop_ids": _stop_ids(model_path, tokenizer),
        "pool_special_tokens": pool_special_tokens,
        "pool_system": pool_system,
        "allow_special_tokens": allow_special_tokens,
    }
    if not has_images:
        return TextEncoder(tokenizer, **options)
    limits = {"min_pixels": min_pixels, "max_pixels": max_pixels, "trust_remote_code": trust_remote_code}
    kind: Any = family.encoder
    encoder = kind.from_checkpoint(model_path, tokenizer, config, **limits, **options)
    encoder.video_settings = video or encoder.video_settings
    return encoder


def find_family(config: PreTrainedConfig) -> ModelFamily:
    """The family of a model with this configuration. A text model need not be described."""
    if config.model_type in FAMILIES:
        return FAMILIES[config.model_type]
    return UndescribedFamily() if is_vision_model(config) else TextFamily(config.model_type)


def is_vision_model(config: PreTrainedConfig) -> bool:
    """Whether it is a vision-language model, described or not."""
    return config.model_type in FAMILIES or config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def register_family(model_path: str, given: Any, trust_remote_code: bool = False) -> None:
    """Use this ModelFamily, a class, for the models of the type of a checkpoint; or a prompt encoder, for a model that
    is built like Qwen's."""
    kind = load_model_config(model_path, trust_remote_code).model_type
    if isinstance(given, type) and issubclass(given, ModelFamily):
        FAMILIES[kind] = given()
    elif isinstance(given, type) and issubclass(given, QwenVLEncoder):
        known = {"encoder": given, "shares_prefix": False, "splits_sequences": False}
        FAMILIES[kind] = type(given.__name__, (QwenVLFamily,), known)()
    else:
        raise PluginError(
            f"{given} is no model family: derive it from mtrl.models.families.ModelFamily, or, if only prompts differ "
            "from Qwen's, from mtrl.models.families.QwenVLEncoder"
        )


def load_model_config(path: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """config.json of a directory or hub id, for adapters that of their base. Raises a ValueError that says what is
    wrong with it."""
    check_no_pipes(path)
    path = base_path(path)
    check_files(path, ["config.json"])
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        if family := re.search(r"has model type `(.+?)`", str(error)):  # transformers does not know it
            raise ValueError(_unknown_family(path, family[1])) from error
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is no checkpoint directory and no hub id that can be reached: {reason}") from error
    except Exception as error:  # values that transformers does not expect end in any error
        raise ValueError(f"{path}: transformers cannot use its config.json: {describe_error(error)}") from error


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory or hub id. Raises a ValueError that says what is wrong with it."""
    check_files(path, TOKENIZER_FILES)
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # JSON files that describe no tokenizer end in any error
        raise ValueError(f"{path}: its tokenizer cannot be loaded: {describe_error(error)}") from error


def describe_error(error: Exception) -> str:
    """The class of an error and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def check_no_pipes(path: str) -> None:
    """Raise a ValueError for a pipe among the files of a checkpoint: libraries would wait for it for ever."""
    try:
        check_regular_files(path)
    except OSError as error:
        raise ValueError(f"{error.filename} cannot be read: {error.strerror}") from error


def check_known_family(config: PreTrainedConfig, path: str) -> None:
    """Raise a ValueError for models that are neither vision-language nor text-only causal language models."""
    if not is_vision_model(config) and not _is_text_model(config):
        raise ValueError(_unknown_family(path, config.model_type))


def _unknown_family(path: str, family: str) -> str:
    return (
        f"{path} is of the family {family!r}; MTRL knows {', '.join(FAMILIES)}, other vision-language models of "
        f"transformers as far as they pass a check, and text-only causal language models; {HOW_TO_ADD}"
    )


def _is_text_model(config: PreTrainedConfig) -> bool:
    """Whether it is a text-only causal language model; remote code says so in its auto_map."""
    if config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES or hasattr(config, "vision_config"):
        return False
    remote = getattr(config, "auto_map", None) or {}
    return config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or "AutoModelForCausalLM" in remote


def _read_template(template: str | None) -> str | None:
    """The Jinja text itself, or the content of the file it names (a name has neither braces nor line breaks)."""
    if template and not any(sign in template for sign in "{}\n"):
        if not Path(template).is_file():
            raise ValueError(f"the chat template {template!r} is neither Jinja text nor a file")
        return Path(template).read_text(encoding="utf-8")
    return template


def encoder_files(encoder: TextEncoder, model_path: str | Path) -> dict[str, bytes]:
    """The files next to the weights of a checkpoint: the tokenizer, and the model's original processor settings. Read
    them once, before any thread uses the tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        encoder.tokenizer.save_pretrained(folder)
        for name in PROCESSOR_FILES:
            if file := find_checkpoint_file(str(model_path), name):
                shutil.copyfile(file, Path(folder, name))
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def save_processor(processing_class: Any, origin: str, folder: Path) -> None:
    """Write a processor, or a tokenizer with the processor settings of the checkpoint `origin`; None: both of it."""
    if processing_class is None:
        if not origin:
            raise ValueError(
                "processing_class: pass the processor or tokenizer; the model names no checkpoint with one"
            )
        processing_class = load_tokenizer(origin)
    processing_class.save_pretrained(folder)
    if hasattr(processing_class, "image_processor") or not origin:
        return
    for name in PROCESSOR_FILES:
        if file := find_checkpoint_file(origin, name):
            shutil.copyfile(file, folder / name)


def _stop_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that end a response: the generation config's, otherwise the tokenizer's; with ChatML always both of
    Qwen's, since a base model's config names only <|endoftext|> and would continue past the end of its turn."""
    try:
        stop = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        stop = None
    if stop is None:
        stop = tokenizer.eos_token_id
    ids = [] if stop is None else list(stop) if isinstance(stop, (list, tuple)) else [stop]
    chatml = ["<|im_end|>", "<|endoftext|>"]
    vocabulary = tokenizer.get_vocab()
    if all(token in vocabulary for token in chatml):
        ids += [vocabulary[token] for token in chatml]
    return tuple(dict.fromkeys(ids))
