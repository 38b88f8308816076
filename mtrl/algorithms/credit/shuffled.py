"""Control: a rule that reads shuffled signals. What it still does is not due to its choice of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from mtrl.algorithms.credit.rule import Bonus, Filter, Key, Rule, RunFacts, Target, Weight
from mtrl.algorithms.groups import permutation
from mtrl.types import VIEWS, Experience, Needs, Signals

Across = Literal["tokens", "rows"]


@dataclass(frozen=True)
class Shuffled(Rule):
    """Base of the shuffled kinds. `across` tokens: permute the signals within each response. `across` rows: each
    response gets the signals of another one, repeated if it is longer."""

    rule: Rule
    across: Across = "tokens"

    @property
    def needs(self) -> Needs:
        return self.rule.needs

    def bind(self, run: RunFacts) -> Rule:
        return replace(self, rule=self.rule.bind(run))

    def apply(self, experience: Experience, key: Key) -> Tensor | None:
        row, column = shuffled_positions(experience.rollouts.mask, key, self.across)
        return self.rule.apply(replace(experience, signals=take_signals(experience.signals, row, column)), key)


class ShuffledFilter(Shuffled, Filter):
    def applies_to(self, experience: Experience) -> Tensor:
        assert isinstance(self.rule, Filter)
        return self.rule.applies_to(experience)


class ShuffledWeight(Shuffled, Weight):
    @property
    def target(self) -> Target:  # type: ignore[override]
        assert isinstance(self.rule, Weight)
        return self.rule.target


class ShuffledBonus(Shuffled, Bonus): ...


def shuffled(rule: Rule, across: Across = "tokens") -> Rule:
    """Wrap a rule in the shuffled class of its kind, which decides how it combines with other rules."""
    kind = ShuffledFilter if isinstance(rule, Filter) else ShuffledWeight if isinstance(rule, Weight) else ShuffledBonus
    return kind(rule, across)


def take_signals(signals: Signals, row: Tensor, column: Tensor) -> Signals:
    """Per-token signals gathered from these positions; signals of the prompt stay."""
    per_token = [name for name in VIEWS if name not in ("prompt_attention_mass", "attention_maps")]
    taken = {name: values[row, column] for name in per_token if (values := getattr(signals, name)) is not None}
    return replace(signals, **taken, extra={name: x[row, column] for name, x in signals.extra.items()})


def shuffled_positions(mask: Tensor, key: Key, across: Across) -> tuple[Tensor, Tensor]:
    """[N, T] row and column that each token reads from."""
    row, column = torch.ones_like(mask).nonzero().T.reshape(2, *mask.shape)
    targets = sources = mask.any(1).nonzero().flatten()
    if across == "rows":
        targets = targets[permutation(len(targets), "shuffled", *key)]
        sources = targets.roll(1)  # another row for each, if there is more than one
    for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
        own, theirs = (mask[each].nonzero().flatten() for each in (target, source))
        theirs = theirs[permutation(len(theirs), "shuffled", *key, target)] if across == "tokens" else theirs
        row[target, own] = source
        column[target, own] = theirs[torch.arange(len(own)) % len(theirs)]  # repeat if the source is shorter
    return row, column
