"""The three kinds of credit rules.

    @dataclass(frozen=True)
    class Late(Weight):
        '''Later tokens get more.'''

        slope: float = 0.1
        needs = Needs()  # the signals it reads

        def apply(self, experience, key):
            place = torch.arange(experience.rollouts.mask.shape[1])
            return (1 + self.slope * place).expand(experience.rollouts.mask.shape)

`experience` has rollouts (tokens, mask, text, prompts with their tasks and columns), rewards, signals and advantage.
`key` is (seed, step), for rules that draw: `mtrl.utils.seeding.rng_for("my rule", *key)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from mtrl.types import Experience, Needs

Key = tuple[int, int]  # (seed, step)
Target = Literal["advantage", "mask"]


class DecodeTokens(Protocol):
    """The text of each token of a response; of tokens that are parts of one character the last one has it."""

    def __call__(self, ids: Sequence[int]) -> Sequence[str]: ...


class Rule(ABC):
    """What all kinds share. Subclasses are frozen dataclasses whose fields are the arguments of the configuration."""

    @property
    def needs(self) -> Needs:
        """The signals that the rule reads; subclasses set a class attribute."""
        return Needs()

    def reading(self, pieces: DecodeTokens) -> Rule:
        """The rule that a run uses: one that looks at words keeps what it needs to find them in the tokens."""
        return self

    @abstractmethod
    def apply(self, experience: Experience, key: Key) -> Tensor | None: ...

    def metrics(self, experience: Experience) -> dict[str, float]:
        """What the rule reports with the step, by full metric name; the experience has its credit by now."""
        return {}


class Filter(Rule):
    """Which tokens count: [N, T] bool. Several filters: a token counts where any of them keeps it."""

    def applies_to(self, experience: Experience) -> Tensor:
        """[N] bool: the rows this filter can judge. Tokens of a row that none judges all count."""
        return torch.ones(len(experience), dtype=torch.bool)


class Weight(Rule):
    """A factor of at least 0: [N] for responses or [N, T] for tokens; None where there is nothing to say this time.
    Its target is the advantage, or `mask`: what a token counts for in every sum and denominator."""

    target: Target = "advantage"


class Bonus(Rule):
    """Added to the advantage before it is scaled: [N, T]."""
