"""A rule on signals that belong elsewhere: what it does beyond its choice of tokens is left of it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from mtrl.algorithms.credit.rule import Bonus, Filter, Key, Rule, Target, Weight
from mtrl.types import Experience, Needs, Signals
from mtrl.utils.seeding import rng_for

Across = Literal["tokens", "rows"]


@dataclass(frozen=True)
class Shuffled(Rule):
    """What every kind of shuffled rule does. `across` tokens: within a response the signals of its tokens change
    places. `across` rows: a response gets those of another, repeated where it is longer."""

    rule: Rule
    across: Across = "tokens"

    @property
    def needs(self) -> Needs:
        return self.rule.needs

    def apply(self, experience: Experience, key: Key) -> Tensor | None:
        row, column = elsewhere(experience.rollouts.mask, key, self.across)
        return self.rule.apply(replace(experience, signals=moved(experience.signals, row, column)), key)


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
    """The rule on signals that belong elsewhere, of the kind that it is: that says how it joins others."""
    kind = ShuffledFilter if isinstance(rule, Filter) else ShuffledWeight if isinstance(rule, Weight) else ShuffledBonus
    return kind(rule, across)


def moved(signals: Signals, row: Tensor, column: Tensor) -> Signals:
    """The signals of tokens, each from its place elsewhere; the one of a prompt stays."""
    of_tokens = {
        f.name: getattr(signals, f.name)
        for f in fields(signals)
        if f.name not in ("prompt_attention_mass", "attention_maps")
    }
    return replace(signals, **{name: x[row, column] for name, x in of_tokens.items() if x is not None})


def elsewhere(mask: Tensor, key: Key, across: Across) -> tuple[Tensor, Tensor]:
    """[N, T] row and column of what each token gets."""
    row, column = torch.ones_like(mask).nonzero().T.reshape(2, *mask.shape)
    takers = givers = mask.any(1).nonzero().flatten()
    if across == "rows":
        takers = takers[drawn_order(len(takers), *key)]
        givers = takers.roll(1)  # another for each, where there is another
    for taker, giver in zip(takers.tolist(), givers.tolist(), strict=True):
        own, theirs = (mask[each].nonzero().flatten() for each in (taker, giver))
        theirs = theirs[drawn_order(len(theirs), *key, taker)] if across == "tokens" else theirs
        row[taker, own] = giver
        column[taker, own] = theirs[torch.arange(len(own)) % len(theirs)]  # again from the start where they end
    return row, column


def drawn_order(count: int, *key: int) -> Tensor:
    return torch.from_numpy(rng_for("shuffled", *key).permutation(count))
