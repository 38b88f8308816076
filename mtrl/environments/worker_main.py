"""A process of environments: loads their classes and serves requests until its socket closes. Imports nothing heavy.

One thread does everything: a sync method runs while the loop stands still, coroutines run on the loop. The trainer
sends a sync request only when no other is open, so no call's time limit runs while another's method holds the process.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import random
import time
import traceback
from collections.abc import Coroutine
from typing import Any

import numpy as np

from mtrl.environments.contract import check_arguments, describe, load_environment, reset_arguments
from mtrl.environments.messages import (
    MAX_ERROR,
    Reply,
    Request,
    TooLarge,
    WorkerSetup,
    encode_reply,
    encode_start,
    read_content,
)
from mtrl.environments.randomness import GlobalRandomness, run_with_randomness, seed_for, start_task
from mtrl.environments.records import ErrorKind, ToolSet
from mtrl.rewards.loading import load_reward
from mtrl.rewards.outcomes import Outcome, read_outcome
from mtrl.rewards.signatures import UserReward
from mtrl.sandbox.frames import FRAME, make_frame
from mtrl.sandbox.plain_text import sanitize_tail
from mtrl.sandbox.worker_start import WorkerStart, exit_if_forked, start_worker
from mtrl.utils.plugins import PluginError


class BadArguments(TypeError):
    """The arguments of a call do not fit the tool."""


class EnvironmentProcess:
    def __init__(self, worker: WorkerStart, classes: dict[str, type], functions: dict[str, UserReward]) -> None:
        self.connection, self.limits = worker.connection, worker.setup.limits
        self.classes, self.functions = classes, functions
        self.instances: dict[int, Any] = {}
        self.process, self.received = os.getpid(), bytearray()
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(start_task)  # type: ignore[arg-type]
        self.running: set[asyncio.Task[None]] = set()
        self.sending = asyncio.Lock()
        self.connection.setblocking(False)

    def run(self) -> None:
        while (frame := self.loop.run_until_complete(self.next_frame())) is not None:
            job, message = frame
            request = read_request(message)
            if request.asynchronous:
                task = self.loop.create_task(self.serve_coroutine(job, request))
                self.running.add(task)
                task.add_done_callback(self.running.discard)
            else:
                reply = self.serve(request)
                self.loop.run_until_complete(self.send(job, reply))

    async def next_frame(self) -> tuple[int, bytes] | None:
        while True:
            if len(self.received) >= FRAME.size:
                job, length = FRAME.unpack_from(self.received)
                if len(self.received) >= FRAME.size + length:
                    message = bytes(self.received[FRAME.size : FRAME.size + length])
                    del self.received[: FRAME.size + length]
                    return job, message
            data = await self.loop.sock_recv(self.connection, 1 << 16)
            if not data:
                return None
            self.received += data

    async def send(self, job: int, reply: Reply) -> None:
        async with self.sending:
            await self.loop.sock_sendall(self.connection, make_frame(job, encode_reply(reply)))
        if reply.error == "memory":  # it may never be released, but a new process has none of it
            os._exit(0)

    # ------------------------------------------------------------------------------------------------- one request
    def serve(self, request: Request) -> Reply:
        begin = time.perf_counter()
        try:
            with GlobalRandomness(request.key).installed():
                value = self.start(request)
            if inspect.iscoroutine(value):  # of a sync method that returns one
                value = self.loop.run_until_complete(self.within_limits(value, request))
            reply = self.finish(request, value)
        except BaseException as error:
            exit_if_forked(self.process, error)
            reply = self.failure(request, error)
        exit_if_forked(self.process)
        return timed(reply, begin)

    async def serve_coroutine(self, job: int, request: Request) -> None:
        begin = time.perf_counter()
        try:
            with GlobalRandomness(request.key).installed():
                work = self.start(request)
            reply = self.finish(request, await self.within_limits(work, request))
        except BaseException as error:
            exit_if_forked(self.process, error)
            reply = self.failure(request, error)
        await self.send(job, timed(reply, begin))

    async def within_limits(self, work: Coroutine[Any, Any, Any], request: Request) -> Any:
        return await asyncio.wait_for(run_with_randomness(work, request.key), self.limits.call_seconds)

    def start(self, request: Request) -> Any:
        """Call the method: its result, or a coroutine."""
        if request.verb == "score":
            return self.score(request)
        (session,) = request.sessions
        if request.verb == "reset":
            cls = self.classes[request.name]
            self.instances[session] = cls()
            return self.instances[session].reset(**reset_arguments(cls, request.arguments, seed_for(request.key)))
        if request.verb == "close":
            return getattr(self.instances.pop(session, None), "_close", lambda: None)()
        if request.verb == "get_reward":
            return self.instances[session].get_reward()
        tool = getattr(self.instances[session], request.name)
        if problem := check_arguments(tool, request.arguments):
            raise BadArguments(problem)
        return tool(**request.arguments)

    def score(self, request: Request) -> list[Outcome]:
        """A function that wants environments is a function of many responses: they are a column."""
        samples = [{**sample, "environments": self.instances[session]}
                   for session, sample in zip(request.sessions, request.arguments, strict=True)]  # fmt: skip
        outcomes: dict[int, Outcome] = {}
        self.functions[request.name].score(samples, outcomes.__setitem__)
        return [outcomes[index] for index in range(len(samples))]

    def finish(self, request: Request, value: Any) -> Reply:
        if request.verb == "close" or (request.verb == "reset" and value is None):
            return Reply(request.number)
        if request.verb == "get_reward":
            return Reply(request.number, values=[as_list(read_outcome(value))])
        if request.verb == "score":
            return Reply(request.number, values=[as_list(each) for each in value])
        return Reply(request.number, read_content(value, self.limits))

    def failure(self, request: Request, error: BaseException) -> Reply:
        kind: ErrorKind = "exception"
        message = str(error)[:MAX_ERROR]
        if isinstance(error, BadArguments):
            kind = "arguments"
        elif isinstance(error, TooLarge):
            kind = "too_large"
        elif isinstance(error, MemoryError):
            kind, message = "memory", f"{request.name or request.verb} needed too much memory"
        elif isinstance(error, (asyncio.TimeoutError, asyncio.CancelledError)) and request.asynchronous:
            kind, message = "timeout", f"{request.name or request.verb} took longer than {self.limits.call_seconds:g} s"
        elif not isinstance(error, Exception):  # SystemExit has only a number to say
            message = f"{type(error).__name__}: {message}"
        if kind == "exception":
            traceback.print_exception(error)  # for the author of the tool: the trainer keeps the end of the output
        return Reply(request.number, (message,), kind)


def read_request(message: bytes) -> Request:
    request: Request = pickle.loads(pickle.loads(message)[0])
    return request


def as_list(outcome: Outcome) -> list[Any]:
    return [outcome.value, dict(outcome.extras), outcome.failure]


def timed(reply: Reply, begin: float) -> Reply:
    return Reply(reply.number, reply.content, reply.error, time.perf_counter() - begin, reply.values)


def load(setup: WorkerSetup) -> tuple[dict[str, type], dict[str, UserReward], dict[str, ToolSet], str]:
    """The classes, the functions and the tools, or why they cannot be loaded."""
    random.seed(0)  # what a file draws while it is imported is the same in every process
    np.random.seed(0)
    classes, functions, tools, spec = dict[str, type](), dict[str, UserReward](), dict[str, ToolSet](), ""
    try:
        for name, spec in setup.environments.items():
            classes[name] = load_environment(spec)
            tools[name] = describe(classes[name])
        for name, (spec, keywords) in setup.functions.items():
            functions[name] = load_reward(spec, keywords, setup.limits.call_seconds)
            if functions[name].signature != "trl":
                raise ValueError(
                    "a function that asks for environments has TRL's form: f(completions, environments, ..)"
                )
    except (PluginError, ValueError) as error:
        return classes, functions, tools, f"{spec}: {error}"
    except BaseException:
        return classes, functions, tools, f"{spec}:\n{sanitize_tail(traceback.format_exc())}"
    return classes, functions, tools, ""


def main() -> None:
    worker = start_worker()
    if worker is None:
        return
    classes, functions, tools, error = load(worker.setup)
    worker.connection.sendall(make_frame(0, encode_start(tools, error, worker.contained)))
    if not error:
        EnvironmentProcess(worker, classes, functions).run()
