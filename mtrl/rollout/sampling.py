"""From logits to a token, with randomness that belongs to the row alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mtrl.algorithms.vocab import top_p_top_k
from mtrl.types import Sampling
from mtrl.utils.seeding import rng_for


def first_sample_numbers(task_ids: Sequence[str], sampling: Sampling) -> list[int]:
    """The number of each prompt's first sample. A task that a step takes again (at the end of an epoch, of few rows, or
    in a later call of the step, with the same n) counts on, or its responses would be copies.

    >>> first_sample_numbers(["a", "b", "a"], Sampling(n=8))
    [0, 0, 8]
    >>> first_sample_numbers(["a", "b", "a"], Sampling(n=8, asked={"a": 2}))
    [16, 0, 24]
    """
    earlier = Counter(sampling.times_sampled)
    numbers = []
    for task_id in task_ids:
        numbers.append(sampling.n * earlier[task_id])
        earlier[task_id] += 1
    return numbers


def row_uniforms(task_ids: Sequence[str], first: Sequence[int], sampling: Sampling) -> Tensor:
    """[P * n, max_new_tokens] in [0, 1): the draws of every row, keyed by (seed, step, task id, sample)."""
    draws = [
        rng_for("sample", sampling.seed, sampling.step, task_id, start + sample).random(sampling.max_new_tokens)
        for task_id, start in zip(task_ids, first, strict=True)
        for sample in range(sampling.n)
    ]
    return torch.from_numpy(np.stack(draws))


def choose(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """A token [B] for logits [B, V], and its log-prob under the distribution really sampled from.

    Greedy choices (temperature 0) report the model's own log-prob at temperature 1.
    """
    if sampling.temperature == 0:
        logp = logits.log_softmax(-1)
        tokens = logits.argmax(-1)
    else:
        logp = top_p_top_k(logits / sampling.temperature, sampling.top_p, sampling.top_k).log_softmax(-1)
        cumulative = logp.double().exp().cumsum(-1)
        # Strictly below the total, so that the token found always has a probability above 0.
        reach = uniform[:, None] * cumulative[:, -1:] * (1 - 1e-12)
        # Where all is NaN, nothing is found; the log-prob of the last token says so.
        tokens = torch.searchsorted(cumulative, reach, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return tokens, logp.gather(-1, tokens[:, None])[:, 0]
