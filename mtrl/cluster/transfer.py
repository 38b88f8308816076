"""Prompts on their way to ranks: each is put into Ray's store once, with its pixels, and named from there on.

A step sends the same prompts up to a handful of times: to be answered, measured and learnt from. Ray brings an object
to a machine once, and all processes there read the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import ray

from mtrl.types import Prompt, Rollouts, TrainBatch


class Lent:
    """The driver's side. What is put stays there for as long as the driver holds the prompt."""

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[Prompt, Any] = WeakKeyDictionary()

    def __call__(self, value: Any) -> Any:
        """The same arguments with a name in the place of every prompt."""
        return with_prompts(value, self._name)

    def _name(self, prompt: Prompt) -> Any:
        if prompt not in self._names:
            self._names[prompt] = ray.put(prompt)
        return self._names[prompt]


def fetched(value: Any) -> Any:
    """The rank's side: prompts in the places of their names."""
    return with_prompts(value, ray.get)


def with_prompts(value: Any, changed: Callable[[Any], Any]) -> Any:
    """The value with `changed` prompts, in the records that carry them."""
    if isinstance(value, (Prompt, ray.ObjectRef)):
        return changed(value)
    if isinstance(value, Rollouts):
        return replace(value, prompts=tuple(changed(prompt) for prompt in value.prompts))
    if isinstance(value, TrainBatch):
        return replace(value, rollouts=with_prompts(value.rollouts, changed))
    if type(value) in (list, tuple):
        return type(value)(with_prompts(each, changed) for each in value)
    return value
