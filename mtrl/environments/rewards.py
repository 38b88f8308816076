"""Rewards of environments: their own `get_reward`, and functions that want the parameter `environments`.

Both read the environment of a response as its last turn left it, in its own process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from mtrl.environments.pool import EnvironmentPool
from mtrl.environments.records import ScoreResult
from mtrl.environments.sessions import Sessions
from mtrl.rewards.outcomes import Outcome, completed_future
from mtrl.types import Needs

Sample = Mapping[str, Any]
ROLLOUT_ID = "rollout_id"  # the key of a sample: that of its `Observations`


class EnvironmentReward:
    """The part of the reward that one class of environments gives; None for responses with another one."""

    needs = Needs()

    def __init__(self, sessions: Sessions, class_name: str) -> None:
        self.sessions, self.class_name = sessions, class_name

    def submit(self, samples: Sequence[Sample], group: Sequence[int] | None = None) -> list[Future[Outcome]]:
        return [self._submit(sample) for sample in samples]

    def _submit(self, sample: Sample) -> Future[Outcome]:
        session = self.sessions[sample[ROLLOUT_ID]]
        if session.state.tools.class_name != self.class_name:
            return completed_future(Outcome())
        return convert(session.reward(), to_outcome)

    def close(self) -> None: ...


class EnvironmentFunction:
    """A function that is called with the environments of a group of responses."""

    needs = Needs()

    def __init__(self, pool: EnvironmentPool, sessions: Sessions, spec: str) -> None:
        self.pool, self.sessions, self.spec = pool, sessions, spec

    def submit(self, samples: Sequence[Sample], group: Sequence[int] | None = None) -> list[Future[Outcome]]:
        groups: dict[int, list[int]] = {}
        for row, number in enumerate(range(len(samples)) if group is None else group):
            groups.setdefault(number, []).append(row)
        futures: dict[int, Future[Outcome]] = {}
        for rows in groups.values():
            sessions = [self.sessions[samples[row][ROLLOUT_ID]] for row in rows]
            scored = self.pool.score(self.spec, sessions, [samples[row] for row in rows])
            for place, row in enumerate(rows):
                futures[row] = convert(scored, partial(outcome_of_one, place))
        return [futures[row] for row in range(len(samples))]

    def close(self) -> None: ...


def outcome_of_one(place: int, results: Sequence[ScoreResult]) -> Outcome:
    return to_outcome(results[place])


def to_outcome(result: ScoreResult) -> Outcome:
    return Outcome(result.value, result.extras, result.failure)


def convert(future: Future[Any], function: Callable[[Any], Outcome]) -> Future[Outcome]:
    """A future of what the function makes of the result; a failure becomes one of the outcome."""
    converted: Future[Outcome] = Future()

    def finish(done: Future[Any]) -> None:
        try:
            converted.set_result(function(done.result()))
        except Exception as error:  # the pool was closed
            converted.set_result(Outcome(failure=f"{type(error).__name__}: {error}"))

    future.add_done_callback(finish)
    return converted
