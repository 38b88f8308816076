"""Upper bound of every filter: keep the tokens that the task itself says decided the answer.

A synthetic task knows which characters of a response cause its answer; the tokens that hold one of them count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from mtrl.algorithms.credit.rule import DecodeTokens, Filter, Key, RunFacts
from mtrl.algorithms.credit.token_spans import Span, token_spans
from mtrl.types import Experience
from mtrl.utils.plugins import PluginError, load_user_object

CausalSpans = Callable[[Mapping[str, Any], str], Sequence[Span] | None]


@dataclass(frozen=True)
class Oracle(Filter):
    """`spans` names a function (row, response) -> the character spans that cause the answer, or None if unknown. The
    row has the columns, the answer and the id. The rule does not apply to unknown rows or to rows without an image."""

    spans: str = "mtrl.embedded.scenes:causal_spans"
    decode: ClassVar[DecodeTokens | None] = None  # set by bind

    def __post_init__(self) -> None:
        load_span_function(self.spans)

    def bind(self, run: RunFacts) -> Oracle:
        bound = replace(self)
        object.__setattr__(bound, "decode", run.decode)
        return bound

    def applies_to(self, experience: Experience) -> Tensor:
        return torch.tensor([spans is not None for spans in self.causal_spans(experience)], dtype=torch.bool)

    def apply(self, experience: Experience, key: Key) -> Tensor:
        rollouts = experience.rollouts
        keep = torch.zeros_like(rollouts.mask)
        for row, causal in enumerate(self.causal_spans(experience)):
            if causal is not None:
                assert self.decode is not None, "bind was not called"
                valid = rollouts.mask[row]
                spans = token_spans(self.decode(rollouts.tokens[row, valid].tolist()), rollouts.text[row])
                keep[row, valid] = torch.tensor([any(a < end and start < b for a, b in causal) for start, end in spans])
        return keep

    def causal_spans(self, experience: Experience) -> list[Sequence[Span] | None]:
        """The causal spans of each response; None if the task cannot say."""
        rollouts, find_spans = experience.rollouts, load_span_function(self.spans)
        tasks = [rollouts.prompts[group].task for group in rollouts.group.tolist()]
        rows = [{**(task.columns or {}), "answer": task.answer, "id": task.id} for task in tasks]
        responses = zip(tasks, rows, rollouts.text, strict=True)
        return [find_spans(row, text) if task.visual else None for task, row, text in responses]


@lru_cache
def load_span_function(spec: str) -> CausalSpans:
    function: CausalSpans = load_user_object(spec, "function of causal spans")
    if not callable(function):
        raise PluginError(f"{spec} is no function (row, response) -> [(start, end), ..]")
    return function
