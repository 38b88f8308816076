"""What the model says of sampled tokens, under any view of the image.

Log-prob, entropy and visual dependency of every response token; with gradients for the update, without for the probes.
A prompt is read once for its whole group, and its images are seen once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mtrl.algorithms.signals import bounded_dependency, visual_dependency
from mtrl.algorithms.vocab import CHUNK_POSITIONS, TokenScores, full_kl, token_scores
from mtrl.models.backbone import Backbone, prompt_positions, vision_tokens
from mtrl.protocols import PromptEncoder
from mtrl.types import Rollouts, Signals

Views = Sequence[tuple[np.ndarray, ...]]  # the media of each prompt, as another pair of eyes sees them


@dataclass(frozen=True)
class Forward:
    """Scores rollouts under the model's current weights, at the rollout temperature."""

    backbone: Backbone
    encoder: PromptEncoder
    temperature: float = 1.0
    share_prefix: bool = True
    chunk: int = CHUNK_POSITIONS

    def logp(self, rollouts: Rollouts) -> Tensor:
        """[N, T] log-probs with gradients, on the model's device; 0 off the mask."""
        hidden = self.response_hidden(rollouts)
        scores = self._scores(hidden, rollouts)
        return spread(scores.logp, rollouts.mask)

    @torch.no_grad()
    def signals(
        self,
        rollouts: Rollouts,
        views: Views | None = None,
        *,
        entropy: bool = False,
        dependency: Literal["low_var_kl", "full_kl"] | None = None,
    ) -> Signals:
        """Log-probs of the original image and, for the dependency, of the perturbed `views`."""
        hidden = self.response_hidden(rollouts)
        clean = self._scores(hidden, rollouts, entropy)
        old = spread(clean.logp, rollouts.mask).cpu()
        entropies = None if clean.entropy is None else spread(clean.entropy, rollouts.mask).cpu()
        if dependency is None:
            return Signals(old=old, entropy=entropies)
        assert views is not None, "the dependency compares two views"
        other = self.response_hidden(rollouts, views)
        perturbed = spread(self._scores(other, rollouts).logp, rollouts.mask).cpu()
        if dependency == "low_var_kl":
            score = visual_dependency(old, perturbed, rollouts.mask)
        else:
            kl = full_kl(hidden, other, self.backbone.output_matrix, **self.distribution())
            score = bounded_dependency(spread(kl, rollouts.mask).cpu(), rollouts.mask)
        return Signals(old=old, perturbed=perturbed, entropy=entropies, dependency=score)

    def response_hidden(self, rollouts: Rollouts, views: Views | None = None) -> Tensor:
        """[M, H]: for every valid response token, row by row, the hidden state of the position that predicts it."""
        device = self.backbone.device
        media: Sequence[tuple[np.ndarray, ...] | None] = [None] * len(rollouts.prompts) if views is None else views
        inputs = [self.encoder.inputs(p, view) for p, view in zip(rollouts.prompts, media, strict=True)]
        features = self.backbone.see(inputs)
        layout = lay_out(rollouts, [prompt_positions(each) for each in inputs], self.share_prefix)
        hidden = self.backbone.read(
            layout.ids.to(device),
            layout.positions.to(device),
            layout.is_vision.to(device),
            [features[g] for g in layout.prompt],
            attention_mask=None if layout.mask is None else layout.mask.to(device),
        )
        return hidden[layout.predicts[0].to(device), layout.predicts[1].to(device)]

    def _scores(self, hidden: Tensor, rollouts: Rollouts, entropy: bool = False) -> TokenScores:
        targets = rollouts.tokens[rollouts.mask].to(hidden.device)
        return token_scores(hidden, self.backbone.output_matrix, targets, entropy=entropy, **self.distribution())

    def distribution(self) -> dict[str, Any]:
        """How hidden states become probabilities, for `algorithms.vocab`."""
        forbidden = torch.tensor(self.encoder.forbidden_ids, device=self.backbone.device, dtype=torch.long)
        return {"temperature": self.temperature, "forbidden": forbidden, "chunk": self.chunk}


@dataclass(frozen=True, eq=False)
class Layout:
    """Rollouts as sequences [B, S] for one pass, right-padded."""

    ids: Tensor  # [B, S]
    positions: Tensor  # [3, B, S]
    is_vision: Tensor  # [B, S]
    mask: Tensor | None  # [B, 1, S, S], None: causal
    prompt: list[int]  # [B] the prompt of each sequence
    predicts: tuple[Tensor, Tensor]  # [M] sequence and place of the position that predicts each response token


def lay_out(rollouts: Rollouts, positions: Sequence[Tensor], share_prefix: bool) -> Layout:
    """One sequence [prompt | r1 | .. | rG] a group, or with `share_prefix` off one [prompt | r] a row.

    Every response continues the prompt's positions and sees the prompt and itself, never its neighbours.
    """
    lengths = rollouts.mask.sum(1).tolist()
    rows_of: dict[int, list[int]] = {}
    for row, g in enumerate(rollouts.group.tolist()):
        rows_of.setdefault(g if share_prefix else row, []).append(row)
    sequences = list(rows_of.values())
    prompts = [int(rollouts.group[rows[0]]) for rows in sequences]
    ids, places, vision, owner = [], [], [], []
    predicts: dict[int, tuple[int, Tensor]] = {}
    for number, (g, rows) in enumerate(zip(prompts, sequences, strict=True)):
        prompt, spans = rollouts.prompts[g], [lengths[row] for row in rows]
        start = size = len(prompt.ids)
        for row, length in zip(rows, spans, strict=True):
            following = torch.arange(start, start + length) - 1
            following[:1] = size - 1  # the prompt's last position predicts every first token
            predicts[row] = (number, following)
            start += length
        responses = [rollouts.tokens[row, : lengths[row]] for row in rows]
        ids.append(torch.cat([prompt.ids, *responses]))
        places.append(continue_positions(positions[g], spans).T)
        vision.append(torch.cat([vision_tokens(prompt), torch.zeros(start - size, dtype=torch.bool)]))
        owner.append(torch.repeat_interleave(torch.arange(len(rows) + 1), torch.tensor([size, *spans])))
    shared = any(len(rows) > 1 for rows in sequences)
    in_order = [predicts[row] for row in range(len(lengths))]
    return Layout(
        pad_sequence(ids, batch_first=True),
        pad_sequence(places, batch_first=True).permute(2, 0, 1),
        pad_sequence(vision, batch_first=True),
        prefix_mask(pad_sequence(owner, batch_first=True)) if shared else None,
        prompts,
        (
            torch.tensor([number for number, _ in in_order]).repeat_interleave(torch.tensor(lengths)),
            torch.cat([place for _, place in in_order]),
        ),
    )


def prefix_mask(owner: Tensor) -> Tensor:
    """[B, 1, S, S] bool: who sees whom. `owner` [B, S] is 0 in the prompt and k in the k-th response."""
    size = owner.shape[1]
    causal = torch.ones(size, size, dtype=torch.bool).tril()
    to_prompt = owner[:, None, :] == 0
    to_own = owner[:, None, :] == owner[:, :, None]
    return (causal & (to_prompt | to_own))[:, None]


def continue_positions(prompt: Tensor, lengths: Sequence[int]) -> Tensor:
    """[3, L + sum of lengths]: each response counts on from the prompt's highest position, in all three axes."""
    responses = [torch.arange(length) + prompt.max() + 1 for length in lengths]
    return torch.cat([prompt, torch.cat(responses).expand(3, -1)], dim=1)


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """Values [M] back to where the mask [N, T] is set, 0 elsewhere; gradients flow."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(
        mask.to(values.device), values
    )
