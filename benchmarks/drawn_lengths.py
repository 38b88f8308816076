"""Responses that end at drawn lengths, whichever engine samples them.

An engine chooses the first token whose cumulative probability is above the row's uniform number. So a uniform of 0
chooses the first token of the vocabulary that may be sampled at all. Here this is the stop token, and the uniforms let
a row sample it exactly at its drawn length. The engine itself is unchanged: it sees an ordinary stop token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from unittest.mock import patch

import torch
from torch import Tensor

from mtrl.models.families import TextEncoder
from mtrl.rollout import local
from mtrl.rollout.decode import engine
from mtrl.rollout.sampling import row_uniforms
from mtrl.types import Sampling
from mtrl.utils.seeding import rng_for

MIN_UNIFORM = 0.1  # the stop token is far less likely than this, so that no drawn uniform chooses it by chance


def draw_lengths(rows: int, sampling: Sampling, shortest: int, *, varying: bool = False) -> Tensor:
    """[rows] lengths drawn between `shortest` and the sampling's limit; they depend on the step alone. `varying`: the
    upper limit is drawn as well."""
    draw = rng_for("drawn lengths", sampling.seed, sampling.step)
    longest = max(shortest, sampling.max_new_tokens)
    if varying:
        longest = shortest + int(draw.random() * (longest - shortest + 1))
    drawn = shortest + (torch.from_numpy(draw.random(rows)) * (longest - shortest + 1)).long()
    return drawn.clamp(max=sampling.max_new_tokens)


@contextmanager
def drawn_lengths(encoder: TextEncoder, shortest: int, *, varying: bool = False) -> Iterator[None]:
    """Within the context, every engine samples responses of drawn lengths."""

    def uniforms(task_ids: Sequence[str], first: Sequence[int], sampling: Sampling) -> Tensor:
        assert sampling.temperature > 0 and not sampling.cut, "the stop token must have a chance"
        draws = MIN_UNIFORM + (1 - MIN_UNIFORM) * row_uniforms(task_ids, first, sampling)
        ends = draw_lengths(len(draws), sampling, shortest, varying=varying) - 1
        draws[torch.arange(len(draws)), ends] = 0.0
        return draws

    stop = next(token for token in count() if token not in encoder.forbidden_ids)
    with (
        patch.object(encoder, "stop_ids", (stop,)),
        patch.object(local, "row_uniforms", uniforms),
        patch.object(engine, "row_uniforms", uniforms),
    ):
        yield
