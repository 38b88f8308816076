"""The base class of loss terms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from mtrl.types import Needs
from mtrl.utils.user_code import call_user_code, check_shape


class LossTerm(ABC):
    """Added to the loss of every valid token, and averaged as `optimization.loss_type` says. Subclasses are frozen
    dataclasses whose fields are the arguments in the configuration."""

    @property
    def needs(self) -> Needs:
        """The signals that the term reads, one number per token each; subclasses set a class attribute."""
        return Needs()

    @abstractmethod
    def term(self, logp: Tensor, signals: Mapping[str, Tensor]) -> Tensor:
        """[N, T], with gradients through the current policy's log-probs `logp` [N, T]. `signals` are those of `needs`,
        measured before the updates of the step, and `visual` [N, 1] bool, the responses that saw an image. Off the mask
        anything may be there."""

    @property
    def name(self) -> str:
        return type(self).__name__.lower()


def compute_term(term: LossTerm, logp: Tensor, signals: Mapping[str, Tensor]) -> Tensor:
    """The term of each token, checked."""
    what = f"loss term {type(term).__name__}"
    values = call_user_code(what, lambda: term.term(logp, signals))
    check_shape(what, values, logp.shape, "the loss of each token, [N, T]")
    return values
