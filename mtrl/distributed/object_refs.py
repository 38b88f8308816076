"""Prompts on their way to ranks: each is put into Ray's store once, with its pixels, and named from there on.

A step sends the same prompts up to a handful of times: to be answered, measured and learnt from. Ray brings an object
to a machine once, and all processes there read the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from mtrl.types import Prompt, Rollouts, TrainBatch


@dataclass(frozen=True)
class Name:
    """Stands for a prompt in the store."""

    reference: Any


class ObjectRefs:
    """The driver's side; `put` is the store's. A prompt stays there for as long as the driver holds it."""

    def __init__(self, put: Callable[[Any], Any]) -> None:
        self.put = put
        self._names: WeakKeyDictionary[Prompt, Name] = WeakKeyDictionary()

    def __call__(self, value: Any) -> Any:
        """The same arguments with a name in the place of every prompt."""
        return with_prompts(value, self._name)

    def _name(self, prompt: Prompt) -> Name:
        if prompt not in self._names:
            self._names[prompt] = Name(self.put(prompt))
        return self._names[prompt]


def resolved(value: Any, get: Callable[[list[Any]], list[Any]]) -> Any:
    """The rank's side: prompts in the places of their names. `get` is the store's and is asked once for all of them:
    one by one, each would wait for the driver and the store to have their turn."""
    references: list[Any] = []
    with_prompts(value, lambda name: references.append(name.reference))
    prompts = iter(get(references))
    return with_prompts(value, lambda name: next(prompts))


def with_prompts(value: Any, changed: Callable[[Any], Any]) -> Any:
    """The value with `changed` prompts, in the records that carry them."""
    if isinstance(value, (Prompt, Name)):
        return changed(value)
    if isinstance(value, Rollouts):
        return replace(value, prompts=tuple(changed(prompt) for prompt in value.prompts))
    if isinstance(value, TrainBatch):
        return replace(value, rollouts=with_prompts(value.rollouts, changed))
    if type(value) in (list, tuple):
        return type(value)(with_prompts(each, changed) for each in value)
    return value
