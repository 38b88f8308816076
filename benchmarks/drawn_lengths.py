"""Responses that end at drawn lengths, whichever engine samples them.

An engine chooses a token by the row's own uniform number: the first whose cumulated probability is above it. So a
uniform of 0 chooses the first token of the vocabulary that may be sampled at all. Here that is the one that ends a
response, and the uniforms are such that a row meets it at the length drawn for it and not before. The engine itself is
as users have it: it sees a stop token."""

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

SPARED = (
    0.1  # uniforms below this are not drawn, so that the stop token, far less likely than that, is not met by chance
)


def lengths_of(rows: int, sampling: Sampling, shortest: int, *, varying: bool = False) -> Tensor:
    """[rows]: drawn between `shortest` and the limit of the sampling; others at every step, the same ones each time a
    step is asked for. `varying`: what they are drawn up to is drawn as well."""
    draw = rng_for("drawn lengths", sampling.seed, sampling.step)
    longest = max(shortest, sampling.max_new_tokens)
    if varying:
        longest = shortest + int(draw.random() * (longest - shortest + 1))
    drawn = shortest + (torch.from_numpy(draw.random(rows)) * (longest - shortest + 1)).long()
    return drawn.clamp(max=sampling.max_new_tokens)


@contextmanager
def drawn_lengths(encoder: TextEncoder, shortest: int, *, varying: bool = False) -> Iterator[None]:
    """Every engine samples responses of such lengths meanwhile."""

    def uniforms(task_ids: Sequence[str], first: Sequence[int], sampling: Sampling) -> Tensor:
        assert sampling.temperature > 0 and not sampling.cut, "the stop token must have a chance"
        draws = SPARED + (1 - SPARED) * row_uniforms(task_ids, first, sampling)
        ends = lengths_of(len(draws), sampling, shortest, varying=varying) - 1
        draws[torch.arange(len(draws)), ends] = 0.0
        return draws

    stop = next(token for token in count() if token not in encoder.forbidden_ids)
    with (
        patch.object(encoder, "stop_ids", (stop,)),
        patch.object(local, "row_uniforms", uniforms),
        patch.object(engine, "row_uniforms", uniforms),
    ):
        yield
