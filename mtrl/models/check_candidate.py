"""What the checks of a model family work on: a model in our hands and in transformers', and measures of their gap."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mtrl.models.backbone import Backbone
from mtrl.models.forward import Forward
from mtrl.models.parity import plain_log_probs
from mtrl.models.perturb import Perturbation
from mtrl.protocols import Generator, PromptEncoder
from mtrl.types import Prompt, Rollouts

# Some gradients are 0 but for rounding (a bias of keys moves all scores alike): they are compared with this part of the
# largest gradient of all weights.
SMALLEST_GRADIENT = 1e-3
PREFIX_MULTIPLE = 64  # of the blocks in which recurrent layers and kernels read a prompt
WATCHED = 1  # a response between two others of its group: a causal mask alone hides only the later one
SHORT = 4  # tokens; the convolution of recurrent layers reads so many
Gradients = Mapping[str, Tensor]


@dataclass(frozen=True)
class Finding:
    """The result of a check. `limit` None: it was skipped, `note` says why."""

    check: str
    worst: float
    limit: float | None
    note: str = ""

    @property
    def skipped(self) -> bool:
        return self.limit is None

    @property
    def passed(self) -> bool:
        return self.limit is None or self.worst <= self.limit  # False for NaN


class NotApplicable(Exception):
    """Why a check says nothing about a model."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A model twice, over the same weights: `forward` runs ours, `plain` is as transformers loads it. The responses in
    `rollouts` are those of `check_lengths`; `generator` samples with our model."""

    path: str
    forward: Forward
    plain: PreTrainedModel
    rollouts: Rollouts
    generator: Generator
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_lengths(self.rollouts)

    @property
    def dtype(self) -> torch.dtype:
        return self.plain.dtype

    @property
    def encoder(self) -> PromptEncoder:
        return self.forward.encoder

    @cached_property
    def log_probs(self) -> Tensor:
        return log_probs(self.forward, self.rollouts)

    @cached_property
    def plain_log_probs(self) -> Tensor:
        return self.compute_plain(self.plain)

    @cached_property
    def views(self) -> list[tuple[np.ndarray, ...]]:
        return [Perturbation().view(prompt, 0) for prompt in self.rollouts.prompts]

    @cached_property
    def wide(self) -> Candidate:
        """The same in float32 or wider: sums of gradients in 16 bits lose what a fault would change."""
        if self.dtype.itemsize >= torch.float32.itemsize:
            return self
        plain: Any = copy.deepcopy(self.plain).float()
        return replace(self, plain=plain, forward=replace(self.forward, backbone=Backbone(share_weights(plain))))

    def rows(self) -> list[tuple[Prompt, Tensor]]:
        """The prompt and the tokens of each response."""
        rollouts = self.rollouts
        each = zip(rollouts.group.tolist(), rollouts.tokens, rollouts.mask, strict=True)
        return [(rollouts.prompts[g], tokens[mask]) for g, tokens, mask in each]

    @torch.no_grad()
    def compute_plain(self, model: PreTrainedModel, perturbed: bool = False) -> Tensor:
        """[N, T] by a plain forward of each row, 0 off the mask."""
        result = torch.zeros(self.rollouts.mask.shape)
        for row, (prompt, response) in enumerate(self.rows()):
            view = self.views[int(self.rollouts.group[row])] if perturbed else None
            result[row, : len(response)] = plain_log_probs(model, self.encoder, prompt, response, view=view)
        return result


def check_lengths(rollouts: Rollouts) -> None:
    """Responses in which faults show: groups, short responses, prompts that are not a whole number of blocks."""
    lengths, group = rollouts.mask.sum(1).tolist(), rollouts.group.tolist()
    prefixes = [len(rollouts.prompts[g].ids) for g in group]
    assert all(prefix % PREFIX_MULTIPLE for prefix in prefixes), f"whole blocks among prompts of {prefixes} tokens"
    assert max(prefixes) > PREFIX_MULTIPLE, f"no prompt is longer than a block: {prefixes}"
    assert min(lengths) == 1 and sum(length < SHORT for length in lengths) > 1, f"short responses in {lengths}"
    assert group.count(group[0]) > 2 and len(set(group)) > 1, f"several groups, the first of three: {group}"


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the modules over the same weights."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(each): each for each in tensors})


def change_other_responses(rollouts: Rollouts) -> Rollouts:
    """Every token of every response but the watched one becomes another one of the same text."""
    known = rollouts.tokens[rollouts.mask].unique()
    following = known.roll(-1)[torch.searchsorted(known, rollouts.tokens).clamp(max=len(known) - 1)]
    changes = rollouts.mask.clone()
    changes[WATCHED] = False
    tokens = torch.where(changes, following, rollouts.tokens)
    assert torch.equal(tokens != rollouts.tokens, changes), "every token is another one"
    return replace(rollouts, tokens=tokens)


# ------------------------------------------------------------------------------------------------------------- measures
def log_probs(forward: Forward, rollouts: Rollouts) -> Tensor:
    found = forward.signals(rollouts).old_logprobs
    assert found is not None
    return found


def gap(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference; NaN if there is any."""
    return float((ours.double() - theirs.double()).abs().max())


def token_weights(rollouts: Rollouts) -> Tensor:
    """Weights of a loss. They are unequal: equal ones would hide swapped tokens."""
    return torch.linspace(-1, 2, rollouts.mask.numel()).view(rollouts.mask.shape) * rollouts.mask


def gradients(candidate: Candidate, forward: Forward, rollouts: Rollouts, weights: Tensor) -> Gradients:
    """The gradients of a weighted sum of log-probs, by our passes."""
    values = forward.logp(rollouts)
    return _differentiate((values * weights.to(values.device)).sum(), candidate.plain)


def plain_gradients(candidate: Candidate, weights: Tensor) -> Gradients:
    """The same by a plain forward and backward of each row."""
    total: dict[str, Tensor] = {}
    for (prompt, response), row in zip(candidate.rows(), weights, strict=True):
        values = plain_log_probs(candidate.plain, candidate.encoder, prompt, response)
        found = _differentiate((values * row[: len(response)]).sum(), candidate.plain)
        total = {name: total[name] + each if name in total else each for name, each in found.items()}
    return total


def _differentiate(loss: Tensor, model: PreTrainedModel) -> Gradients:
    weights = {name: each for name, each in model.named_parameters() if each.requires_grad}
    found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    named = zip(weights.items(), found, strict=True)
    return {name: torch.zeros_like(weight) if each is None else each for (name, weight), each in named}


def gradient_gap(ours: Gradients, theirs: Gradients) -> tuple[float, str]:
    """The largest difference relative to the largest gradient of each weight, and the name of that weight."""
    sizes = {name: float(each.abs().max()) for name, each in theirs.items()}
    floor = SMALLEST_GRADIENT * max(sizes.values())
    gaps = {name: gap(ours[name], each) / max(sizes[name], floor) for name, each in theirs.items()}
    worst = max(gaps, key=lambda name: np.inf if np.isnan(gaps[name]) else gaps[name])
    return gaps[worst], worst
