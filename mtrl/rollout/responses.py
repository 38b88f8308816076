"""Makes `Rollouts` from rows of tokens, for every engine and for recorded responses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mtrl.types import FinishReason, Observations, Prompt, Rollouts


def make_rollouts(
    prompts: Sequence[Prompt],
    group: Sequence[int],
    tokens: Sequence[Sequence[int] | Tensor],
    rollout_logprobs: Sequence[Sequence[float] | Tensor] | None,
    *,
    text: Sequence[str],
    finish: Sequence[FinishReason],
    version: int,
    pad_id: int,
    routed_experts: Sequence[Tensor] | None = None,
    observations: Sequence[Observations] | None = None,
) -> Rollouts:
    """`group` is the prompt index of each response; the responses of a prompt are next to each other.

    `tokens` and `rollout_logprobs` (under the distribution really sampled from) hold one row per response, with its
    stop token. `rollout_logprobs` is None for responses that were not sampled; they become zeros. `routed_experts`
    [tokens, layers, k] are those of a mixture of experts."""
    rows = [torch.as_tensor(row, dtype=torch.long) for row in tokens]
    sizes = len(group), len(rows), len(text), len(finish)
    assert len(set(sizes)) == 1, f"groups, tokens, texts and finish reasons differ in number: {sizes}"
    lengths = torch.tensor([len(row) for row in rows])
    padded = pad_sequence(rows, batch_first=True, padding_value=pad_id)
    return Rollouts(
        prompts=tuple(prompts),
        group=torch.tensor(group),
        tokens=padded,
        mask=torch.arange(padded.shape[1]) < lengths[:, None],
        rollout_logprobs=torch.zeros(padded.shape) if rollout_logprobs is None else _pad(rollout_logprobs, rows),
        text=tuple(text),
        finish_reason=tuple(finish),
        version=torch.full((len(rows),), version),
        routed_experts=None if routed_experts is None else pad_sequence(list(routed_experts), batch_first=True),
        observations=None if observations is None else tuple(observations),
    )


def finish_reasons(tokens: Sequence[Sequence[int] | Tensor], stop_ids: Sequence[int]) -> list[FinishReason]:
    """How each response ended: with a stop token, or at the length limit.

    >>> finish_reasons([[5, 2], [5, 5], []], stop_ids=[2])
    ['stop', 'length', 'length']
    """
    return ["stop" if len(row) and int(row[-1]) in stop_ids else "length" for row in tokens]


def _pad(logprobs: Sequence[Sequence[float] | Tensor], tokens: Sequence[Tensor]) -> Tensor:
    rows = [torch.as_tensor(row, dtype=torch.float32) for row in logprobs]
    assert [len(row) for row in rows] == [len(row) for row in tokens], "each token needs one log-prob"
    return pad_sequence(rows, batch_first=True)
