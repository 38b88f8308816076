"""transformers' own processor of a checkpoint: what prompts are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import transformers
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer, PreTrainedConfig
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from mtrl.models.checkpoint_files import read_checkpoint_json
from mtrl.models.patches import import_gemma4_processor
from mtrl.types import Prompt

NOT_LOADED = ("video_processor", "feature_extractor")  # arguments of processors


def load_processor(path: str, config: PreTrainedConfig, trust_remote_code: bool = False) -> Any:
    """The processor of a family's checkpoint; for a text model its tokenizer. Without torchvision there is no processor
    of videos, on which the loaders of most families insist: then the same class is built without one, and without one
    of sounds."""
    name = PROCESSOR_MAPPING_NAMES.get(config.model_type)
    if name is None and not hasattr(config, "vision_config"):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    if name == "Gemma4Processor":
        import_gemma4_processor()
    try:
        return AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (ImportError, ValueError) as error:  # which of them depends on the file that is missing
        if name is None or "torchvision" not in str(error).lower():
            raise
    kind: Any = getattr(transformers, name)
    images = AutoImageProcessor.from_pretrained(path, backend="pil", trust_remote_code=trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    accepted, saved = signature(kind).parameters, read_checkpoint_json(path, "processor_config.json")
    options = {"chat_template": tokenizer.chat_template} | {name: saved[name] for name in saved if name in accepted}
    options |= {name: None for name in NOT_LOADED if name in accepted}
    return _with_images_alone(kind)(**options | {"image_processor": images, "tokenizer": tokenizer})


def _with_images_alone(kind: Any) -> Any:
    class WithImagesAlone(kind):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name not in NOT_LOADED or argument is not None:
                return super().check_argument_for_proper_class(argument_name, argument)
            return None

    WithImagesAlone.__name__ = kind.__name__  # for messages
    return WithImagesAlone


def process_prompt(processor: Any, prompt: Prompt, resize: bool = True) -> Mapping[str, Any]:
    """The inputs of the model for a prompt, by the processor alone. The images have their target size already, which
    `resize` should not change; with narrow limits of pixels it does."""
    messages: Sequence[Any] = [dict(message) for message in prompt.task.messages]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    options: dict[str, Any] = {"add_special_tokens": False}  # the template wrote them
    if prompt.media:
        options |= {"images": [Image.fromarray(medium) for medium in prompt.media]}
        options |= {} if resize else {"do_resize": False}
    return processor(text=[text], **options, return_tensors="pt")
