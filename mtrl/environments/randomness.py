"""Python's and numpy's global random numbers, begun anew for every call by its key. Imports nothing heavy.

So a call gives the same numbers whatever other environments of the process drew before or draw meanwhile: a coroutine
has its own state, which is exchanged whenever it goes on and whenever it waits, and so has each task that it starts.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from mtrl.utils.seeding import rng_for

Key = tuple[int | str, ...]


def seed_for(key: Key) -> int:
    """For environments that ask for a `seed`.

    >>> seed_for((1, 0, "a", 0)) == seed_for((1, 0, "a", 0)) != seed_for((1, 0, "a", 1))
    True
    """
    return int(rng_for(*key).integers(2**32))


class GlobalRandomness:
    """The states of both global generators in one call, or in one task of it."""

    def __init__(self, key: Key) -> None:
        self.key, self.tasks = key, 0
        seed = seed_for(key)
        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = np.random.RandomState(seed).get_state()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within the context the numbers continue from here; after it, others continue as before."""
        before = random.getstate(), np.random.get_state()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        try:
            yield
        finally:
            self._python, self._numpy = random.getstate(), np.random.get_state()
            random.setstate(before[0])
            np.random.set_state(before[1])


CURRENT: ContextVar[GlobalRandomness | None] = ContextVar("randomness of the running call", default=None)


class WithOwnRandomness:
    """Awaits a coroutine whose numbers go on where they were, whatever else runs while it waits."""

    def __init__(self, work: Coroutine[Any, Any, Any], randomness: GlobalRandomness) -> None:
        self.work, self.randomness = work, randomness

    def __await__(self) -> Generator[Any, Any, Any]:
        answer, error = None, None
        while True:
            with self.randomness.installed():
                try:
                    waits_for = self.work.send(answer) if error is None else self.work.throw(error)
                except StopIteration as done:
                    return done.value
            answer, error = None, None
            try:
                answer = yield waits_for
            except BaseException as raised:  # a cancellation, for example, is for the coroutine to handle
                error = raised


async def run_with_randomness(work: Coroutine[Any, Any, Any], key: Key) -> Any:
    randomness = GlobalRandomness(key)
    CURRENT.set(randomness)
    return await WithOwnRandomness(work, randomness)


def start_task(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
    """The task factory of a loop: the tasks of a call draw from their own numbers, keyed by the order of starting."""
    caller = CURRENT.get()
    if caller is not None:
        caller.tasks += 1
        work = run_with_randomness(work, (*caller.key, "task", caller.tasks))
    return asyncio.Task(work, loop=loop, **options)
