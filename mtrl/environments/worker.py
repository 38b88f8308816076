"""The trainer's side of a process of environments: a thread that sends it requests and rebuilds what it loses.

A process ends if a call in it takes too long, needs too much memory, or ends it. All its environments are then built
again in a new one, each before its next call, by its recorded calls with their keys; what a call did that did not come
back has not happened. If a repeated call gives something else than before, the environment is given up: what the model
has read would no longer be true. A call whose process *died* is tried once more, alone: another may have been the
reason.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import queue
import select
import socket
import threading
import time
from collections import Counter, deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from mtrl.environments.messages import Reply, Request, WorkerSetup, decode_reply, decode_start, encode_reply
from mtrl.environments.records import ErrorKind, RolloutKey, ScoreResult, ToolResult, ToolSet
from mtrl.sandbox.frames import WorkerLost
from mtrl.sandbox.image_files import ImageFiles, pack
from mtrl.sandbox.worker_process import END_SECONDS, START_SECONDS, WorkerProcess, warn_about_strays

MAX_ENDED = 3  # processes that the calls of one environment may end; then it is given up
GRACE_SECONDS = 2.0  # for a process to stop a coroutine itself
FIXED_HASHES = {"PYTHONHASHSEED": "0"}  # sets of texts have the same order in every process

logger = logging.getLogger(__name__)


@dataclass
class SessionState:
    """An environment, as its worker's thread knows it."""

    number: int
    key: RolloutKey
    environment: str  # its class
    row: dict[str, Any]
    tools: ToolSet
    history: list[tuple[Request, bytes]] = field(default_factory=list)  # calls that came back, and what they gave
    built: int = -1  # number of the process that has it
    ended: int = 0  # processes that its calls ended
    lost: str = ""  # why it was given up


@dataclass
class Work:
    """A request, the future of its result, and what happened to it."""

    request: Request
    sessions: list[SessionState]
    future: Future[Any]
    asked: float = field(default_factory=time.monotonic)
    sent: float = 0.0
    losses: int = 0  # processes that ended while it ran
    alone: bool = False  # nothing else may run: it might be the reason of a loss

    @property
    def changes_state(self) -> bool:
        return self.request.verb in ("reset", "call")


def digest(reply: Reply) -> bytes:
    return hashlib.blake2b(encode_reply(replace(reply, number=0, seconds=0.0)), digest_size=16).digest()


class EnvironmentWorker:
    """One process at a time, its environments and its thread."""

    def __init__(self, setup: WorkerSetup, images: ImageFiles) -> None:
        self.setup, self.limits, self.images = setup, setup.limits, images
        self.process: WorkerProcess | None = None
        self.generation = 0  # number of the process
        self.tools: dict[str, ToolSet] = {}
        self.waiting: deque[Work] = deque()
        self.arrived: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self.running: dict[int, Work] = {}
        self.errors: Counter[ErrorKind] = Counter()
        self.numbers, self.closing = 0, threading.Event()
        self.wake_reader, self.wake_writer = socket.socketpair()
        self.wake_reader.setblocking(False)
        self.wake_writer.setblocking(False)

    # ------------------------------------------------------------------------------------------ from other threads
    def submit(self, work: Work) -> None:
        self.arrived.put(work)
        self.wake()
        if self.closing.is_set():
            self.fail_all()

    def wake(self) -> None:
        with suppress(OSError):  # if it is full, it wakes as well
            self.wake_writer.send(b"x")

    def close(self, thread: threading.Thread | None) -> None:
        self.closing.set()
        self.wake()
        if process := self.process:
            process.kill()
        if thread and thread is not threading.current_thread():  # the garbage collector may call from any thread
            thread.join(END_SECONDS)
        self.fail_all()

    def fail_all(self) -> None:
        with suppress(queue.Empty):
            while True:
                self.fail(self.arrived.get_nowait(), "closed", "the environments were closed")

    # ------------------------------------------------------------------------------------------- the worker's thread
    def run(self) -> None:
        while not self.closing.is_set():
            try:
                self.dispatch()
                self.wait()
            except WorkerLost as lost:
                self.recover(str(lost))
            except BaseException as error:  # if the thread ended, rollouts would wait for ever
                logger.exception("a process of environments failed")
                self.recover(f"{type(error).__name__}: {error}")
        for work in (*self.running.values(), *self.waiting):
            self.fail(work, "closed", "the environments were closed")
        self.drop()

    def wait(self) -> None:
        """Until a reply or a request comes; open requests must be answered in time."""
        if not self.running:
            poll = select.poll()
            poll.register(self.wake_reader, select.POLLIN)
            poll.poll()
        else:
            assert self.process is not None
            last = min(work.sent for work in self.running.values()) + self.seconds()
            late = f"took longer than {self.limits.call_seconds:g} s"
            message = self.process.receive_or_wake(last - time.monotonic(), self.wake_reader.fileno(), late)
            if message is not None:
                self.take(decode_reply(message, self.limits))
        with suppress(BlockingIOError):
            self.wake_reader.recv(1 << 16)
        with suppress(queue.Empty):
            while True:
                self.waiting.append(self.arrived.get_nowait())

    def seconds(self) -> float:
        """A coroutine is stopped by its process, which says so; only if it does not is the process ended."""
        grace = GRACE_SECONDS if any(work.request.asynchronous for work in self.running.values()) else 0.0
        return self.limits.call_seconds + grace

    def dispatch(self) -> None:
        """Send what may run now: any number of coroutines, or one other request."""
        while work := self.next_work():
            self.waiting.remove(work)
            if work.request.verb == "close":
                if work.sessions[0].built == self.generation:
                    self.send(work)
                else:  # nobody is there to be closed
                    self.settle(work, Reply(1))
            elif self.is_built(work):
                self.send(work)

    def next_work(self) -> Work | None:
        """The first request whose environments are free; no coroutine overtakes a request that waits for all others."""
        busy = {each.number for work in self.running.values() for each in work.sessions}
        for work in self.waiting:
            numbers = {each.number for each in work.sessions}
            if numbers & busy:
                busy |= numbers  # the calls of an environment keep their order
                continue
            return None if self.running and self.is_exclusive(work) else work
        return None

    def is_exclusive(self, work: Work) -> bool:
        others_exclusive = any(each.alone or not each.request.asynchronous for each in self.running.values())
        repeats = work.request.verb not in ("reset", "close")
        rebuilds = repeats and any(each.built != self.generation for each in work.sessions)
        return others_exclusive or rebuilds or work.alone or not work.request.asynchronous

    def is_built(self, work: Work) -> bool:
        """Have the environments of a request in the process, from their recorded calls. If that is impossible, the
        request fails."""
        missing = [] if work.request.verb == "reset" else work.sessions
        session = work.sessions[0]
        try:
            process = self.process or self.start()
            for session in missing:
                if session.built != self.generation and not session.lost:
                    self.replay(process, session)
        except (ValueError, OSError) as error:  # its file has changed, for example
            self.fail(work, "lost", f"the environment could not be started again: {error}")
            return False
        except WorkerLost as lost:
            self.drop()
            work.losses += 1
            if work.losses > 1:
                session.lost = f"the environment ended with its process ({lost}) and could not be rebuilt"
            self.waiting.appendleft(work)
            return False
        if reason := next((each.lost for each in work.sessions if each.lost), ""):
            self.fail(work, "lost", reason)
        return not reason

    def replay(self, process: WorkerProcess, session: SessionState) -> None:
        for request, expected in session.history:
            reply = self.exchange(process, request)
            if digest(reply) != expected:
                session.lost = ("the environment ended with its process and could not be rebuilt: a repeated call gave "
                                "another result than before")  # fmt: skip
                logger.warning("%s: %s (%s)", session.tools.class_name, session.lost, request.name)
                return
        session.built = self.generation

    def exchange(self, process: WorkerProcess, request: Request) -> Reply:
        self.numbers += 1
        process.send(
            pack([replace(request, number=self.numbers)], self.images), self.limits.call_seconds, same_job=True
        )
        seconds = self.limits.call_seconds + GRACE_SECONDS
        reply = decode_reply(process.receive(seconds), self.limits)
        if reply.number != self.numbers:
            raise WorkerLost("its process sent an invalid message")
        return reply

    def send(self, work: Work) -> None:
        assert self.process is not None
        self.numbers += 1
        work.request = replace(work.request, number=self.numbers)
        try:
            message = pack([work.request], self.images)
        except Exception as error:  # a column that cannot be pickled
            self.fail(work, "exception", f"{type(error).__name__}: {error}"[:500])
            return
        work.sent = time.monotonic()
        self.running[self.numbers] = work
        self.process.send(message, self.limits.call_seconds, same_job=True)
        work.sent = time.monotonic()

    def take(self, reply: Reply) -> None:
        work = self.running.pop(reply.number, None)
        if work is None or (reply.error is None and len(reply.values) != work_values(work)):
            if work is not None:
                self.running[reply.number] = work
            raise WorkerLost("its process sent an invalid message")
        session = work.sessions[0]
        if reply.error in ("memory", "timeout"):  # it has not happened: a coroutine was stopped in the middle
            session.built = -1
            self.count_ended(session, reply.error)
        elif work.changes_state and reply.error != "arguments":
            session.history.append((work.request, digest(reply)))
        if work.request.verb == "reset":
            session.built = self.generation
            if reply.error:
                session.lost = f"reset failed: {text_of(reply)}"
        printed = self.process.output() if self.process else ""  # also read after a success, or it would go to the next
        self.settle(work, reply, printed)
        if reply.error == "memory":
            raise WorkerLost("needed too much memory")

    def recover(self, reason: str) -> None:
        """After the end of a process: try what was running again, each alone, or give it up as the reason."""
        late, output = reason.startswith("took longer"), self.process.output() if self.process else ""
        self.drop()
        running, self.running = list(self.running.values()), {}
        for work in reversed(running):
            work.losses += 1
            if len(running) == 1 and (late or work.losses > 1):
                self.blame(work, "timeout" if late else "died", reason, output)
            else:
                work.alone = True
                self.waiting.appendleft(work)

    def blame(self, work: Work, kind: ErrorKind, reason: str, output: str) -> None:
        for session in work.sessions if work.changes_state else ():
            self.count_ended(session, kind)
        if work.request.verb == "reset":
            work.sessions[0].lost = f"reset failed: {reason}"
        self.fail(work, kind, f"{work.request.name or work.request.verb}: {reason}", output)

    def count_ended(self, session: SessionState, kind: ErrorKind) -> None:
        session.ended += 1
        if session.ended >= MAX_ENDED:
            session.lost = f"the environment was stopped after {MAX_ENDED} calls like the last one ({kind})"

    def start(self) -> WorkerProcess:
        """Raise a ValueError that says why the classes cannot be loaded."""
        setup = pickle.dumps(self.setup)
        limit = self.limits.message_bytes + (1 << 20)
        process = self.process = WorkerProcess(
            self.images.directory.name, "mtrl.environments.worker_main", limit, FIXED_HASHES
        )
        try:
            process.send(setup, START_SECONDS)
            self.tools, error, contained = decode_start(process.receive(START_SECONDS))
        except WorkerLost as lost:
            error, contained = f"{lost}\n{process.output()}", True
        if error:
            self.drop()
            raise ValueError(error)
        if not contained:
            warn_about_strays()
        return process

    def drop(self) -> None:
        if process := self.process:
            self.process = None
            self.generation += 1
            process.release()

    # ------------------------------------------------------------------------------------------------------- results
    def settle(self, work: Work, reply: Reply, output: str = "") -> None:
        waited = time.monotonic() - work.asked
        name = work.request.name if work.request.verb == "call" else work.request.verb
        circumstances: dict[str, Any] = {"seconds": reply.seconds, "waited": waited, "output": output}
        result: Any = ToolResult(name, reply.content, **circumstances)
        if reply.error:
            result = ToolResult.failed(name, reply.error, text_of(reply), **circumstances)
            self.errors[reply.error] += 1
        if work.request.verb in ("get_reward", "score"):
            scores = [ScoreResult(*each) for each in reply.values]
            if reply.error:
                scores = [ScoreResult(failure=text_of(reply))] * len(work.sessions)
            result = scores if work.request.verb == "score" else scores[0]
        with suppress(InvalidStateError):  # its owner has cancelled it
            work.future.set_result(result)

    def fail(self, work: Work, kind: ErrorKind, message: str, output: str = "") -> None:
        self.settle(work, Reply(1, (message,), kind), output)


def work_values(work: Work) -> int:
    """How many rewards a reply has."""
    return len(work.sessions) if work.request.verb in ("get_reward", "score") else 0


def text_of(reply: Reply) -> str:
    return "".join(block for block in reply.content if isinstance(block, str))
