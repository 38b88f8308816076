"""Reward models with random weights, and responses for them."""

import shutil
from dataclasses import replace

import torch
from safetensors.torch import load_file, save_file
from tiny_models import checkpoint, random_rollouts
from transformers import AutoConfig, AutoModelForSequenceClassification, BertConfig, BertTokenizer

from mtrl.types import Medium, Task
from pretraining.tiny_checkpoints import make_tiny_checkpoint

RESPONSES = ["red", "it is blue and not a dog", "", "the sum of 3 and 4 is seven, so B", "<answer>A</answer>", "green"]
GROUP = [0, 0, 0, 1, 1, 2]


def text_reward_model(directory, num_labels=1, template=True):
    """A sequence classifier of the Qwen2 family with random weights, far from zero."""
    make_tiny_checkpoint(directory, "qwen2")
    config = AutoConfig.from_pretrained(directory, num_labels=num_labels)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    model.save_pretrained(directory)
    if not template:
        (directory / "chat_template.jinja").unlink()
    return str(directory)


def vision_reward_model(directory, family, head=None):
    """A vision-language checkpoint with a `score.weight` next to the backbone."""
    shutil.copytree(checkpoint(family), directory)
    weights = load_file(directory / "model.safetensors")
    weights["score.weight"] = torch.randn(1, 64, generator=torch.Generator().manual_seed(1)) if head is None else head
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


def make_task(text, images=0, system=None):
    content = [*[{"type": "image"}] * images, {"type": "text", "text": text}] if images else text
    first = [{"role": "system", "content": system}] if system else []
    media = (Medium("image", None),) * images
    return Task(text, text, (*first, {"role": "user", "content": content}), media=media)


def make_rollouts(encoder, tasks_and_media, responses=RESPONSES, group=GROUP):
    """Rollouts with these texts; their tokens are the policy's and do not matter to a reward model."""
    prompts = [encoder.encode(task, media) for task, media in tasks_and_media]
    return replace(random_rollouts(prompts, group, [3] * len(group)), text=tuple(responses))


def bert_reward_model(directory):
    """BERT with 12 positions: a checkpoint, its model and its tokenizer."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "which", "colour", "red", "blue"]
    tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(words)}, model_max_length=12)
    config = BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=12, num_labels=1, initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model, tokenizer
