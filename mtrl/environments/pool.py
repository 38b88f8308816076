"""Environments for the rollouts of a run: one instance per rollout, the rollouts of a prompt in one process.

    pool = EnvironmentPool("tools.py:Zoom", EnvironmentLimits(), workers=4)
    (session,) = pool.open([{"images": [picture]}], [RolloutKey(seed=0, step=1, task="3f9a:0", sample=0)])
    session.reset().result().content                          # what ends the prompt
    futures = pool.call([(session, call) for call in parse_tool_calls(text, session.schemas)])
    for future in as_completed(futures): future.result()      # nobody waits for the slowest
    session.reward().result()
    session.close()

Every result is a `concurrent.futures.Future`: `wait` and `as_completed` of that module give those that are ready.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from mtrl.environments.messages import Request, Verb, WorkerSetup
from mtrl.environments.records import (
    EnvironmentLimits,
    ErrorKind,
    RolloutKey,
    ScoreResult,
    ToolCall,
    ToolResult,
    ToolSet,
)
from mtrl.environments.worker import EnvironmentWorker, SessionState, Work
from mtrl.sandbox.image_files import ImageFiles
from mtrl.sandbox.worker_process import memory_per_worker
from mtrl.utils.errors import StartError

COLUMN = "environment"  # of a row: names its environment, if there are several
Row = Mapping[str, Any]
Functions = Mapping[str, Mapping[str, Any]]
Key = tuple[int | str, ...]  # of random numbers


class EnvironmentPool:
    """`workers` processes, each with the environments of whole groups. The first loads the classes at once.

    `environments`: `file.py:Class`, or one for each name that the rows' column `environment` may have. `functions`: the
    reward functions (`file.py:name` and their keyword arguments) that want the parameter `environments`. The processes
    end on close, on garbage collection and at interpreter exit.
    """

    def __init__(
        self,
        environments: str | Mapping[str, str],
        limits: EnvironmentLimits | None = None,
        workers: int = 1,
        functions: Functions | None = None,
    ) -> None:
        self.limits = limits = limits or EnvironmentLimits()
        self.by_column = not isinstance(environments, str)
        specs = {"": environments} if isinstance(environments, str) else dict(environments)
        memory = limits.memory_bytes or memory_per_worker(workers)
        loaded = {spec: (spec, dict(keywords)) for spec, keywords in (functions or {}).items()}
        setup, images = WorkerSetup(specs, loaded, limits, memory), ImageFiles()
        self._workers = [EnvironmentWorker(setup, images) for _ in range(workers)]
        try:
            self._workers[0].start()
        except ValueError as error:
            raise StartError(f"the environment cannot be used: {error}") from None
        self.tools: Mapping[str, ToolSet] = self._workers[0].tools
        self._errors: Counter[ErrorKind] = Counter()
        self._groups: dict[tuple[Any, ...], tuple[EnvironmentWorker, set[int]]] = {}
        self._opened = 0
        threads = [threading.Thread(target=worker.run, daemon=True) for worker in self._workers]
        for thread in threads:
            thread.start()
        self.close = weakref.finalize(self, close_all, self._workers, threads)

    def open(self, rows: Sequence[Row], keys: Sequence[RolloutKey]) -> list[Session]:
        """One session per rollout. Rollouts of one step and task share a process."""
        if len(set(keys)) != len(keys):
            raise ValueError("two rollouts have the same key: they would draw the same numbers")
        return [self._open(row, key) for row, key in zip(rows, keys, strict=True)]

    def call(self, calls: Sequence[tuple[Session, ToolCall]]) -> list[Future[ToolResult]]:
        """One turn: a response's calls run in their order, those of different sessions beside each other."""
        for session in {id(session): session for session, _ in calls}.values():
            session.turn, session.calls = session.turn + 1, 0
        return [self._call(session, call) for session, call in calls]

    def score(
        self, function: str, sessions: Sequence[Session], samples: Sequence[Mapping[str, Any]]
    ) -> Future[list[ScoreResult]]:
        """The rewards of a group by a function that wants `environments`, which gets them all in one call."""
        if len({session.worker for session in sessions}) != 1:
            raise ValueError("the sessions of a call are those of one group: only these share a process")
        first = sessions[0]
        key = (*first.state.key.group, "environment", function)
        work = Work(Request("score", tuple(each.state.number for each in sessions), key, function, list(samples)),
                    [each.state for each in sessions], Future())  # fmt: skip
        first.worker.submit(work)
        return work.future

    @property
    def errors(self) -> Counter[ErrorKind]:
        """How many requests had an error, by kind."""
        copies = [dict(worker.errors) for worker in self._workers]  # in one step: their threads count on
        return sum(map(Counter, copies), self._errors.copy())

    def _open(self, row: Row, key: RolloutKey) -> Session:
        name = row.get(COLUMN) if self.by_column else ""
        if name not in self.tools:
            known = ", ".join(self.tools)
            raise ValueError(f"the row's column {COLUMN} is {name!r}, which is none of the environments: {known}")
        given = {column: value for column, value in row.items() if column != COLUMN or not self.by_column}
        if key.group not in self._groups:
            loads = dict.fromkeys(self._workers, 0)
            for worker, members in self._groups.values():
                loads[worker] += len(members)
            self._groups[key.group] = min(self._workers, key=loads.__getitem__), set()
        worker, members = self._groups[key.group]
        self._opened += 1
        members.add(self._opened)
        return Session(self, worker, SessionState(self._opened, key, str(name), given, self.tools[str(name)]))

    def _forget(self, session: Session) -> None:
        group = session.state.key.group
        _, members = self._groups.get(group, (None, set()))
        members.discard(session.state.number)
        if not members:
            self._groups.pop(group, None)

    def _call(self, session: Session, call: ToolCall) -> Future[ToolResult]:
        session.calls += 1
        limits, names = self.limits, session.state.tools.names
        if call.error is not None:
            return self._refuse(call, "malformed", call.error)
        if session.turn > limits.turns:
            return self._refuse(
                call, "turns", f"No tool may be called after {limits.turns} turns with calls: answer now."
            )
        if session.calls > limits.calls:
            return self._refuse(call, "turns", f"Only {limits.calls} calls are made in one turn; this one was not.")
        if call.name not in names:
            listed = ", ".join(names) or "none"
            return self._refuse(call, "unknown_tool", f"Tool {call.name[:100]} not found. There is: {listed}.")
        key = session.state.key.at(session.turn, session.calls)
        return session.request("call", key, call.name, dict(call.arguments))

    def _refuse(self, call: ToolCall, kind: ErrorKind, message: str) -> Future[ToolResult]:
        self._errors[kind] += 1
        future: Future[ToolResult] = Future()
        future.set_result(ToolResult.failed(call.name, kind, message))
        return future


class Session:
    """The environment of one rollout."""

    def __init__(self, pool: EnvironmentPool, worker: EnvironmentWorker, state: SessionState) -> None:
        self.pool, self.worker, self.state = pool, worker, state
        self.turn = self.calls = 0
        self._reset = self._closed = False

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The tools, as a chat template takes them."""
        return self.state.tools.schemas

    def reset(self) -> Future[ToolResult]:
        """Begin, once. The content ends the prompt's last message. The rollouts of a group share their prompt, so all
        of them draw the same numbers here."""
        if self._reset:
            raise ValueError("a session begins once; open another for another rollout")
        self._reset = True
        key = replace(self.state.key, sample=0).at(0)
        return self.request("reset", key, self.state.environment, self.state.row)

    def reward(self) -> Future[ScoreResult]:
        """The reward by the environment's own `get_reward`; None if it has none."""
        if self.state.tools.rewards:
            return self.request("get_reward", self.state.key.at(self.pool.limits.turns + 1))
        future: Future[ScoreResult] = Future()
        future.set_result(ScoreResult())
        return future

    def close(self) -> None:
        """End the rollout, after all that was asked before."""
        if not self._closed:
            self._closed = True
            self.request("close", self.state.key.at(self.pool.limits.turns + 2))
            self.pool._forget(self)

    def request(self, verb: Verb, key: Key, name: str = "", arguments: Any = None) -> Future[Any]:
        if not self._reset or (self._closed and verb != "close"):
            raise ValueError("a session is used after reset and before close")
        method = {"call": name, "close": "_close"}.get(verb, verb)
        waits = method in self.state.tools.asynchronous
        request = Request(verb, (self.state.number,), key, name, arguments, asynchronous=waits)
        work = Work(request, [self.state], Future())
        self.worker.submit(work)
        return work.future


def close_all(workers: list[EnvironmentWorker], threads: list[threading.Thread]) -> None:
    """End all processes; what runs fails at once."""
    for worker, thread in zip(workers, threads, strict=True):
        worker.close(thread)
