"""Samples: the dict of each response for reward functions, SPEC's first signature; the others are made from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from PIL import Image
from torch import Tensor

from mtrl.algorithms.signals import ATTENTION, SHIFTS, pool_sizes, segment, sequence_mass, vgr
from mtrl.types import SEGMENTS, VIEWS, Prompt, Rollouts, Signals

PER_TOKEN = tuple(name for name in VIEWS if name not in ATTENTION or name in SHIFTS)  # [N, T]; others have more axes


def make_samples(
    rollouts: Rollouts,
    options_key: str = "options",
    answer_key: str = "answer",
    progress: Mapping[str, int] | None = None,
) -> list[dict[str, Any]]:
    """Make one dict per response: prompt, response, response_token_ids, ground_truth, images, videos (their paths or
    bytes, if the row has any) and every dataset column.

    `progress` is the progress of the run, as in TRL's `trainer_state`. The responses to a prompt share their objects.
    """
    lengths = rollouts.mask.sum(1).tolist()
    state = {} if progress is None else {"trainer_state": dict(progress)}
    shared = [prompt_fields(prompt, options_key, answer_key) | state for prompt in rollouts.prompts]
    samples: list[dict[str, Any]] = [
        {**shared[g], "response": text, "response_token_ids": tokens[:n].tolist()}
        for g, text, tokens, n in zip(rollouts.group.tolist(), rollouts.text, rollouts.tokens, lengths, strict=True)
    ]
    for sample, observed in zip(samples, rollouts.observed, strict=True):
        if observed is not None:
            sample["rollout_id"] = observed.id
    return samples


def prompt_fields(prompt: Prompt, options_key: str, answer_key: str) -> dict[str, Any]:
    """Return the fields that all responses to a prompt share. They replace columns of the same name."""
    task = prompt.task
    columns = {answer_key: task.answer, **(task.columns or {})}
    if options_key in columns:
        columns.setdefault("options", columns[options_key])
    sample = {
        **columns,
        "prompt": task.text,
        "ground_truth": task.answer,
        "images": [Image.fromarray(medium) for medium in prompt.media if medium.ndim == 3],
    }
    if videos := [medium.source for medium in task.media if medium.kind == "video"]:  # not all their frames
        sample["videos"] = videos
    return sample | {"prompt_messages": list(task.messages)} if task.chat else sample


def signal_lists(rollouts: Rollouts, signals: Signals | None) -> list[dict[str, Any]]:
    """Return the signals of each response: {"old_logprobs": [one number per token], "entropy": .., ..},
    and those of `optimization.signals` under their names.

    With attention also "vgr" for each token, and "vgr_early", "vgr_late", .. of the whole response; both are missing if
    they do not apply.
    """
    measured: dict[str, Tensor] = {}
    if signals is not None:
        measured = {name: value for name in PER_TOKEN if (value := getattr(signals, name)) is not None}
        measured |= signals.extra
    lengths = rollouts.mask.sum(1).tolist()
    rows: list[dict[str, Any]] = [
        {name: value[row, :n].tolist() for name, value in measured.items()} for row, n in enumerate(lengths)
    ]
    if signals is not None and signals.attention_mass is not None:
        add_attention(rows, rollouts, signals.attention_mass)
    return rows


def add_attention(rows: list[dict[str, Any]], rollouts: Rollouts, mass: Tensor) -> None:
    sizes = pool_sizes(rollouts.prompts)[rollouts.group]
    by_token = vgr(segment(mass, "all"), sizes[:, None])
    by_response = vgr(sequence_mass(mass, rollouts.mask), sizes[:, None])  # [N, segments]
    for row, values in enumerate(by_response.tolist()):
        known = {f"vgr_{name}": value for name, value in zip(SEGMENTS, values, strict=True) if value == value}
        known.pop("vgr_weight", None)  # an internal segment, for token weights
        if known:
            rows[row] |= {"vgr": by_token[row, rollouts.mask[row]].tolist(), **known}
