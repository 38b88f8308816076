"""The upper end of every filter: credit goes where the task itself says that the answer was decided.

A task made by code knows which characters of a response cause its answer; the tokens that hold one of them count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from mtrl.algorithms.credit.rule import DecodeTokens, Filter, Key
from mtrl.algorithms.credit.token_spans import Span, token_places
from mtrl.algorithms.credit.user_rules import load_own
from mtrl.types import Experience
from mtrl.utils.plugins import PluginError

CausalSpans = Callable[[Mapping[str, Any], str], Sequence[Span] | None]


@dataclass(frozen=True)
class Oracle(Filter):
    """`spans` names a function of a row (its columns, answer and id) and a response: the characters that cause the
    answer, or None where it cannot say. For such rows, and for those without an image, the rule does not speak."""

    spans: str = "mtrl.embedded.scenes:causal_spans"
    pieces: ClassVar[DecodeTokens | None] = None  # what tokens say, once it has been told

    def __post_init__(self) -> None:
        load_span_function(self.spans)

    def reading(self, pieces: DecodeTokens) -> Oracle:
        told = replace(self)
        object.__setattr__(told, "pieces", pieces)
        return told

    def applies_to(self, experience: Experience) -> Tensor:
        return torch.tensor([spans is not None for spans in self.marked(experience)], dtype=torch.bool)

    def apply(self, experience: Experience, key: Key) -> Tensor:
        rollouts = experience.rollouts
        keep = torch.zeros_like(rollouts.mask)
        for row, spans in enumerate(self.marked(experience)):
            if spans is not None:
                assert self.pieces is not None, "nobody has told the rule what tokens say"
                valid = rollouts.mask[row]
                places = token_places(self.pieces(rollouts.tokens[row, valid].tolist()), rollouts.text[row])
                keep[row, valid] = torch.tensor([any(a < end and start < b for a, b in spans) for start, end in places])
        return keep

    def marked(self, experience: Experience) -> list[Sequence[Span] | None]:
        """For each response its spans, or None where there is no word about it."""
        rollouts, find = experience.rollouts, load_span_function(self.spans)
        tasks = [rollouts.prompts[group].task for group in rollouts.group.tolist()]
        rows = [{**(task.columns or {}), "answer": task.answer, "id": task.id} for task in tasks]
        texts = zip(tasks, rows, rollouts.text, strict=True)
        return [find(row, text) if task.visual else None for task, row, text in texts]


@lru_cache
def load_span_function(spec: str) -> CausalSpans:
    function: CausalSpans = load_own(spec, "function of causal spans")
    if not callable(function):
        raise PluginError(f"{spec} is no function (row, response) -> [(start, end), ..]")
    return function
