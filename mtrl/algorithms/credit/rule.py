"""The three kinds of credit rules, and the checks of what a rule returns.

    @dataclass(frozen=True)
    class Late(Weight):
        '''Later tokens get more.'''

        slope: float = 0.1
        needs = Needs()  # the signals it reads

        def apply(self, experience, key):
            position = torch.arange(experience.rollouts.mask.shape[1])
            return (1 + self.slope * position).expand(experience.rollouts.mask.shape)

`experience` has rollouts (tokens, mask, text, prompts with their tasks and columns), rewards, signals and advantage.
`key` is (seed, step), for rules that draw random numbers: `mtrl.utils.seeding.rng_for("my rule", *key)`. Steps count
from 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, TypeVar, get_args

import torch
from torch import Tensor

from mtrl.types import Experience, Needs
from mtrl.utils.errors import RunError
from mtrl.utils.user_code import call_user_code

Key = tuple[int, int]  # (seed, step)
Target = Literal["advantage", "mask"]
Result = TypeVar("Result")


class DecodeTokens(Protocol):
    """Returns the text of each token. If several tokens make one character, the last of them has it."""

    def __call__(self, ids: Sequence[int]) -> Sequence[str]: ...


@dataclass(frozen=True)
class RunFacts:
    """What a rule may know of the run that it is for."""

    total_steps: int
    decode: DecodeTokens | None = None  # None where no tokenizer is at hand, as in a check of the configuration


class Rule(ABC):
    """Base of all kinds. Subclasses are frozen dataclasses whose fields are the arguments in the configuration."""

    @property
    def needs(self) -> Needs:
        """The signals that the rule reads; subclasses set a class attribute."""
        return Needs()

    def bind(self, run: RunFacts) -> Rule:
        """Return the rule for this run. Only rules that look at words, or change over a run, override this."""
        return self

    @abstractmethod
    def apply(self, experience: Experience, key: Key) -> Tensor | None: ...

    def metrics(self, experience: Experience) -> dict[str, float]:
        """Metrics of the step by full name, computed after the credit was assigned."""
        return {}


class Filter(Rule):
    """Selects tokens: [N, T] bool. A token counts if any of several filters keeps it."""

    def applies_to(self, experience: Experience) -> Tensor:
        """[N] bool: the rows this filter can judge. If no filter judges a row, all its tokens count."""
        return torch.ones(len(experience), dtype=torch.bool)


class Weight(Rule):
    """A factor of at least 0: [N] for responses or [N, T] for tokens; None leaves this step unweighted.

    It multiplies the advantage, or, with the target `mask`, what a token counts for in every sum and denominator.
    """

    target: Target = "advantage"


class Bonus(Rule):
    """Added to the advantage before it is scaled: [N, T]."""


# ----------------------------------------------------------------- checks: a wrong answer must not reach the gradient
def call_rule(rule: Rule, function: Callable[[], Result]) -> Result:
    return call_user_code(f"credit rule {type(rule).__name__}", function)


def apply_rule(rule: Rule, experience: Experience, key: Key) -> Tensor:
    """Apply the rule and check the result. Only a weight may return None."""
    value = call_rule(rule, partial(rule.apply, experience, key))
    if value is None and isinstance(rule, Weight):
        return value  # type: ignore[return-value]
    if fault := find_fault(rule, value, experience.rollouts.mask):
        raise RunError(f"credit rule {type(rule).__name__} {fault}")
    assert value is not None
    return value if isinstance(rule, Filter) else value.float()


def covered_rows(rule: Filter, experience: Experience) -> Tensor:
    """[N] bool: the rows that the filter applies to."""
    rows = call_rule(rule, partial(rule.applies_to, experience))
    if not isinstance(rows, Tensor) or rows.shape != (len(experience),) or rows.dtype != torch.bool:
        expected = f"applies_to must return a bool for each of {len(experience)} responses"
        raise RunError(f"credit rule {type(rule).__name__}: {expected}")
    return rows


def find_fault(rule: Rule, value: object, mask: Tensor) -> str | None:
    """What is wrong with the returned value, and what it should be; None if nothing is."""
    rows, width = mask.shape
    kind = "a bool" if isinstance(rule, Filter) else "a number"
    shapes = [(rows, width), (rows,)] if isinstance(rule, Weight) else [(rows, width)]
    expected = f"a tensor of {' or '.join(str(list(shape)) for shape in shapes)}, {kind} each"
    if not isinstance(value, Tensor):
        return f"returned {type(value).__name__}; it must return {expected}"
    fits = (value.dtype == torch.bool) == isinstance(rule, Filter) and not value.is_complex()
    if tuple(value.shape) not in shapes or not fits:
        return f"returned {value.dtype} of {list(value.shape)}; it must return {expected}"
    if isinstance(rule, Weight) and rule.target not in get_args(Target):
        return f"has the target {rule.target!r}; it must be {' or '.join(get_args(Target))}"
    valid = value[mask] if value.ndim == 2 else value[mask.any(1)]
    if not valid.isfinite().all():
        count = int((~valid.isfinite()).sum())
        return f"returned {count} of {valid.numel()} values that are not finite (NaN or infinity); guard its division"
    if isinstance(rule, Weight) and (valid < 0).any():
        return f"returned the weight {float(valid.min()):g}; a weight is at least 0, a Bonus may be negative"
    return None
