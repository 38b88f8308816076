"""Responses of several turns: what was read between the tokens that the model wrote itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mtrl.types import TEXT_POOL, Observations, Prompt, Rollouts, Task


def join_prompts(parts: Sequence[Prompt], id: str) -> Prompt:
    """The tokens and the media of all parts in their order; the task of the first, under another id."""
    media, messages = (
        tuple(each for part in parts for each in getattr(part.task, name)) for name in ("media", "messages")
    )
    ids, engine_ids, pool = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "engine_ids", "token_pool")
    )
    pixels = tuple(each for part in parts for each in part.media)
    return Prompt(replace(parts[0].task, id=id, media=media, messages=messages), pixels, ids, engine_ids, pool)


def written(ids: Tensor) -> Prompt:
    """Tokens that the model wrote, to join."""
    return Prompt(Task("", "", ()), (), ids, ids, torch.full_like(ids, TEXT_POOL))


def content(observations: Observations) -> Prompt:
    """All messages, one after the other."""
    return join_prompts([turn.message for turn in observations.turns], observations.id)


def conversation(observations: Observations, prompt: Prompt, own: Tensor) -> Prompt:
    """The prompt, the response's own tokens and the messages as one prompt, which a next turn continues."""
    pieces, begin = [prompt], 0
    for turn in observations.turns:
        pieces += [written(own[begin : turn.after]), turn.message]
        begin = turn.after
    return join_prompts([*pieces, written(own[begin:])], f"{observations.id}.{len(observations.turns)}")


def interleave(observations: Observations, own: Tensor, read: Tensor) -> Tensor:
    """The values of a response's own tokens [n, ..] and of its messages [C, ..] in the order of reading."""
    messages = read.split([len(turn.message.ids) for turn in observations.turns])
    pieces, begin = [], 0
    for turn, message in zip(observations.turns, messages, strict=True):
        pieces += [own[begin : turn.after], message]
        begin = turn.after
    return torch.cat([*pieces, own[begin:]])


def rows_with_turns(rollouts: Rollouts) -> dict[int, Observations]:
    """The rows that were told something, and what."""
    return {row: each for row, each in enumerate(rollouts.observed) if each is not None and each.turns}


def encoded_prompts(rollouts: Rollouts) -> tuple[Prompt, ...]:
    """All that was encoded for the model: the prompts, then the messages of each of `rows_with_turns`."""
    return *rollouts.prompts, *map(content, rows_with_turns(rollouts).values())
