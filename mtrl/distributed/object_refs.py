"""Prompts on their way to ranks: each is put into Ray's object store once, with its pixels, and sent as a reference.

A step sends the same prompts several times: to generate, to probe and to update. Ray brings an object to a machine
once, and all processes there read the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from mtrl.types import Prompt, Rollouts, TrainBatch


@dataclass(frozen=True)
class PromptRef:
    """Stands for a prompt in the store."""

    reference: Any


class ObjectRefs:
    """The driver's side; `put` stores an object. A prompt stays in the store for as long as the driver holds it."""

    def __init__(self, put: Callable[[Any], Any]) -> None:
        self.put = put
        self._refs: WeakKeyDictionary[Prompt, PromptRef] = WeakKeyDictionary()

    def share(self, value: Any) -> Any:
        """The same value with a reference in place of every prompt."""
        return map_prompts(value, self._ref)

    def _ref(self, prompt: Prompt) -> PromptRef:
        if prompt not in self._refs:
            self._refs[prompt] = PromptRef(self.put(prompt))
        return self._refs[prompt]


def resolve(value: Any, get: Callable[[list[Any]], list[Any]]) -> Any:
    """The rank's side: the value with the prompts in place of their references. `get` fetches all of them in one call:
    one by one, each would wait for the driver and the store."""
    references: list[Any] = []
    map_prompts(value, lambda ref: references.append(ref.reference))
    prompts = iter(get(references))
    return map_prompts(value, lambda _: next(prompts))


def map_prompts(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with `change` applied to every prompt, also inside records, lists and tuples."""
    if isinstance(value, (Prompt, PromptRef)):
        return change(value)
    if isinstance(value, Rollouts):
        return replace(value, prompts=tuple(change(prompt) for prompt in value.prompts))
    if isinstance(value, TrainBatch):
        return replace(value, rollouts=map_prompts(value.rollouts, change))
    if type(value) in (list, tuple):
        return type(value)(map_prompts(each, change) for each in value)
    return value
