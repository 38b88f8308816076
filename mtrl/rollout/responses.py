"""From rows of tokens to `Rollouts`: every engine, and responses that were written down, come through here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mtrl.types import Finish, Prompt, Rollouts


def make_rollouts(
    prompts: Sequence[Prompt],
    group: Sequence[int],
    tokens: Sequence[Sequence[int] | Tensor],
    behaviour: Sequence[Sequence[float] | Tensor] | None,
    *,
    text: Sequence[str],
    finish: Sequence[Finish],
    version: int,
    pad_id: int,
) -> Rollouts:
    """The record of responses; `group` names the prompt of each by its place, all of a prompt together.

    `tokens` and `behaviour` (the log-prob of each token under the distribution really sampled from) hold a row for each
    response, as long as it is, with its end token. Without `behaviour` nobody sampled the responses, and it is zero.
    """
    rows = [torch.as_tensor(row, dtype=torch.long) for row in tokens]
    sizes = len(group), len(rows), len(text), len(finish)
    assert len(set(sizes)) == 1, f"groups, tokens, texts and endings of the responses differ in number: {sizes}"
    lengths = torch.tensor([len(row) for row in rows])
    padded = pad_sequence(rows, batch_first=True, padding_value=pad_id)
    return Rollouts(
        prompts=tuple(prompts),
        group=torch.tensor(group),
        tokens=padded,
        mask=torch.arange(padded.shape[1]) < lengths[:, None],
        rollout_logprobs=torch.zeros(padded.shape) if behaviour is None else _padded_logps(behaviour, rows),
        text=tuple(text),
        finish_reason=tuple(finish),
        version=torch.full((len(rows),), version),
    )


def finish_reasons(tokens: Sequence[Sequence[int] | Tensor], stop_ids: Sequence[int]) -> list[Finish]:
    """How each response ended: with a stop token, or else at the length limit.

    >>> finish_of([[5, 2], [5, 5], []], stop_ids=[2])
    ['stop', 'length', 'length']
    """
    return ["stop" if len(row) and int(row[-1]) in stop_ids else "length" for row in tokens]


def _padded_logps(behaviour: Sequence[Sequence[float] | Tensor], tokens: Sequence[Tensor]) -> Tensor:
    rows = [torch.as_tensor(row, dtype=torch.float32) for row in behaviour]
    assert [len(row) for row in rows] == [len(row) for row in tokens], "each token needs a log-prob, and no other does"
    return pad_sequence(rows, batch_first=True)
