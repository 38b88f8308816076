"""From logits to a token, with random numbers keyed by the row."""

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
    """The number of each prompt's first sample. If a step takes a task again (at the end of a short epoch, or in a
    later call with the same n), its samples are numbered on, since they would be copies otherwise.

    >>> first_sample_numbers(["a", "b", "a"], Sampling(n=8))
    [0, 0, 8]
    >>> first_sample_numbers(["a", "b", "a"], Sampling(n=8, times_sampled={"a": 2}))
    [16, 0, 24]
    """
    earlier = Counter(sampling.times_sampled)
    numbers = []
    for task_id in task_ids:
        numbers.append(sampling.n * earlier[task_id])
        earlier[task_id] += 1
    return numbers


def row_uniforms(task_ids: Sequence[str], first: Sequence[int], sampling: Sampling) -> Tensor:
    """[P * n, max_new_tokens] in [0, 1): the random numbers of every row, keyed by (seed, step, task id, sample)."""
    draws = [
        rng_for("sample", sampling.seed, sampling.step, task_id, start + sample).random(sampling.max_new_tokens)
        for task_id, start in zip(task_ids, first, strict=True)
        for sample in range(sampling.n)
    ]
    return torch.from_numpy(np.stack(draws))


def choose(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """A token [B] for logits [B, V], and its log-prob under the distribution really sampled from.

    Greedy choices (temperature 0) have the model's log-prob at temperature 1.
    """
    if sampling.temperature == 0:
        logp = logits.log_softmax(-1)
        tokens = logits.argmax(-1)
    else:
        logp = top_p_top_k(logits / sampling.temperature, sampling.top_p, sampling.top_k).log_softmax(-1)
        cumulative = logp.double().exp().cumsum(-1)
        # Strictly below the total, so that the chosen token has a probability above 0.
        reach = uniform[:, None] * cumulative[:, -1:] * (1 - 1e-12)
        # If all is NaN, the search ends behind the last token, whose log-prob is NaN.
        tokens = torch.searchsorted(cumulative, reach, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return tokens, logp.gather(-1, tokens[:, None])[:, 0]
