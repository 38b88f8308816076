"""What a reward function is told of a response: SPEC's first signature."""

from __future__ import annotations

from typing import Any

from PIL import Image

from mtrl.types import Prompt, Rollouts


def samples_of(rollouts: Rollouts, options_key: str = "options") -> list[dict[str, Any]]:
    """One dict a response: prompt, response, response_token_ids, ground_truth, images and every dataset column."""
    lengths = rollouts.mask.sum(1).tolist()
    shared = [prompt_part(prompt, options_key) for prompt in rollouts.prompts]
    return [
        {**shared[g], "response": text, "response_token_ids": tokens[:n].tolist()}
        for g, text, tokens, n in zip(rollouts.group.tolist(), rollouts.text, rollouts.tokens, lengths, strict=True)
    ]


def prompt_part(prompt: Prompt, options_key: str) -> dict[str, Any]:
    """What all responses to a prompt share. The names of the signature win over columns of the same name."""
    columns = dict(prompt.task.columns or {})
    if options_key in columns:
        columns.setdefault("options", columns[options_key])
    return {
        **columns,
        "prompt": prompt_text(prompt),
        "ground_truth": prompt.task.answer,
        "images": [Image.fromarray(medium) for medium in prompt.media if medium.ndim == 3],
    }


def prompt_text(prompt: Prompt) -> str:
    """The messages' text, media as <image> and <video>, without the template's marks."""
    lines = []
    for message in prompt.task.messages:
        content = message.get("content") or ""
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        lines.append("".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in parts))
    return "\n".join(lines)
