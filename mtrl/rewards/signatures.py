"""The ways to call a reward function (SPEC 3): ours, TRL's, EasyR1's and verl's, sync or async. Imports nothing heavy.

    reward_function(data)                                              one response: a dict with all there is to know
    f(prompts, completions, completion_ids, **columns)                 TRL: many responses, a list of rewards
    compute_score(reward_inputs) or compute_score(reward_input)        EasyR1: many or one
    compute_score(data_source, solution_str, ground_truth, extra_info) verl: one

The parameters decide. A function that declares `signals`, or reads that key, is told what the probes measured.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, SimpleNamespace
from typing import Any, Literal

from mtrl.rewards.outcomes import Outcome, last_words, read_outcome

Sample = Mapping[str, Any]
Signature = Literal["mtrl", "trl", "easyr1", "easyr1_batch", "verl"]
Way = tuple[list[Any], dict[str, Any]]  # positional and keyword arguments of a call
Report = Callable[[int, Outcome], object]

NOT_COLUMNS = {"prompt", "prompt_messages", "response", "response_token_ids", "signals", "trainer_state"}


@dataclass(frozen=True)
class Traits:
    """What whoever hands samples to a function must know of it."""

    batch: bool  # a call takes many samples, groups whole
    concurrent: bool  # async: samples that come together run together
    signals: bool  # wants what the probes measured
    name: str | None = None  # REWARD_NAME of its module


class UserReward:
    """A user's function and how it wants to be called. `seconds` limits a single async call; whoever owns the process
    limits the others."""

    def __init__(
        self,
        function: Callable[..., Any],
        kwargs: Mapping[str, Any],
        module: object | None = None,
        seconds: float | None = None,
    ) -> None:
        names, self.takes_any = parameters(function)
        module = module or sys.modules.get(getattr(function, "__module__", ""))
        called = getattr(module, "REWARD_NAME", None)
        self.function, self.kwargs, self.names, self.seconds = function, dict(kwargs), names, seconds
        self.signature = detect_signature(names, getattr(module, "REWARD_TYPE", None))
        self.out_of_memory, self.process = False, os.getpid()
        self.traits = Traits(
            batch=self.signature in ("trl", "easyr1_batch"),
            concurrent=is_async(function),
            signals="signals" in names or mentions(function, "signals"),
            name=None if called is None else str(called),
        )
        self._check_parameters()

    def _check_parameters(self) -> None:
        """A function that no response could ever be handed to is refused before a run begins. TRL's columns are known
        only then."""
        try:
            found = inspect.signature(self.function, follow_wrapped=False)
        except ValueError:
            return
        positional, named = next(self._ways([{"response": ""}], Log()))
        try:
            (found.bind_partial if self.signature == "trl" else found.bind)(*positional, **named, **self.kwargs)
        except TypeError as error:
            form = {"trl": "f(completions, ..)", "verl": "f(data_source, solution_str, ground_truth, extra_info)"}
            raise ValueError(
                f"it cannot be called as {form.get(self.signature, 'f(data)')}, the form its parameters ask for, with "
                f"the keyword arguments {sorted(self.kwargs)} of reward_fn_kwargs: {error}"
            ) from None

    def score(self, samples: Sequence[Sample], report: Report) -> None:
        """Reports (place, outcome) as soon as an outcome is there; nothing a function raises comes out."""
        if self.traits.batch:
            for place, outcome in enumerate(self._run(self._outcomes(samples))):
                report(place, outcome)
        elif self.traits.concurrent:
            self._run(self._all_at_once(samples, report))
        else:
            for place, sample in enumerate(samples):
                report(place, self._run(self._outcomes([sample]))[0])

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return on_loop(work) if self.traits.concurrent else finish(work)

    async def _all_at_once(self, samples: Sequence[Sample], report: Report) -> None:
        async def one(place: int, sample: Sample) -> None:
            report(place, (await self._outcomes([sample]))[0])

        await asyncio.gather(*(one(place, sample) for place, sample in enumerate(samples)))

    async def _outcomes(self, samples: Sequence[Sample]) -> list[Outcome]:
        """The outcomes of one call, one for each sample."""
        begin, log = time.perf_counter(), Log()
        try:
            answer = self._call(samples, log)
            answer = await (asyncio.wait_for(answer, self.seconds) if self.traits.concurrent else answer)
            answers = as_many(answer, len(samples)) if self.traits.batch else [answer]
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            leave_if_forked(self.process, error)
            self.out_of_memory |= isinstance(error, MemoryError)
            failure, seconds = user_traceback(error), time.perf_counter() - begin
            if isinstance(error, asyncio.TimeoutError) and self.seconds and seconds >= self.seconds:
                failure = f"took longer than {self.seconds:g} s"
            return [Outcome(failure=failure, seconds=seconds / len(samples))] * len(samples)
        leave_if_forked(self.process)
        seconds = (time.perf_counter() - begin) / len(samples)
        return [read_outcome(each, seconds, log.of(place)) for place, each in enumerate(answers)]

    async def _call(self, samples: Sequence[Sample], log: Log) -> Any:
        """Tries every way in turn, while the function cannot take the types it gets; the first complaint counts."""
        complaint: Exception | None = None
        for positional, named in self._ways(samples, log):
            try:
                answer = self.function(*positional, **named, **self.kwargs)
                if not inspect.isawaitable(answer):
                    return answer
                return await answer if self.traits.concurrent else on_loop(wait_for(answer))
            except (TypeError, AttributeError) as error:
                complaint = complaint or error
        assert complaint is not None
        raise complaint

    def _ways(self, samples: Sequence[Sample], log: Log) -> Iterator[Way]:
        for positional, offered in WAYS[self.signature](samples, log):
            if "signals" in self.names:
                signals = [sample.get("signals", {}) for sample in samples]
                offered = {**offered, "signals": signals if self.traits.batch else signals[0]}
            wanted = {name: value for name, value in offered.items() if self.takes_any or name in self.names}
            yield positional, {name: value for name, value in wanted.items() if name not in self.kwargs}


# -------------------------------------------------------------------------------------------------- the four signatures
def ours(samples: Sequence[Sample], log: Log) -> list[Way]:
    return [([dict(samples[0])], {})]


def verl(samples: Sequence[Sample], log: Log) -> list[Way]:
    """`extra_info` holds every column, and over them what the row itself calls extra_info."""
    sample = samples[0]
    own = sample.get("extra_info")
    named = {
        "data_source": sample.get("data_source", sample.get("source", "")),
        "solution_str": sample["response"],
        "ground_truth": sample.get("ground_truth"),
        "extra_info": {**sample, **own} if isinstance(own, Mapping) else dict(sample),
    }
    return [([], named)]


def easyr1(samples: Sequence[Sample], log: Log) -> list[Way]:
    return [([_reward_input(samples[0])], {})]


def easyr1_batch(samples: Sequence[Sample], log: Log) -> list[Way]:
    return [([[_reward_input(sample) for sample in samples]], {})]


def _reward_input(sample: Sample) -> dict[str, Any]:
    return {**sample, "response_length": len(sample.get("response_token_ids", ()))}


def trl(samples: Sequence[Sample], log: Log) -> list[Way]:
    """As in TRL, rows that ask with a chat get messages, rows that ask with a text get texts. A function that cannot
    take the one is given the other: many are written for chats, and a row here need not be one."""
    columns = dict.fromkeys(name for sample in samples for name in sample if name not in NOT_COLUMNS)
    shared: dict[str, Any] = {name: [sample.get(name) for sample in samples] for name in columns}
    shared["completion_ids"] = [sample.get("response_token_ids", []) for sample in samples]
    progress = samples[0].get("trainer_state") or {"global_step": 0, "max_steps": 0}
    shared |= {"trainer_state": SimpleNamespace(**progress), "log_extra": log.extra, "log_metric": log.metric}
    if any("signals" in sample for sample in samples):
        shared["signals"] = [sample.get("signals", {}) for sample in samples]
    texts = {
        "prompts": [sample.get("prompt", "") for sample in samples],
        "completions": [sample["response"] for sample in samples],
    }
    chats = {
        "prompts": [s.get("prompt_messages") or [_message("user", s.get("prompt", ""))] for s in samples],
        "completions": [[_message("assistant", sample["response"])] for sample in samples],
    }
    asked_by_chat = all(sample.get("prompt_messages") for sample in samples)
    forms = (chats, texts) if asked_by_chat else (texts, chats)
    return [([], {**shared, **form}) for form in forms]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


WAYS: dict[Signature, Callable[[Sequence[Sample], Log], list[Way]]] = {
    "mtrl": ours, "trl": trl, "easyr1": easyr1, "easyr1_batch": easyr1_batch, "verl": verl,
}  # fmt: skip


@dataclass
class Log:
    """What a TRL function says by way of `log_extra` (a list, one value a response) and `log_metric` (one number)."""

    lists: dict[str, list[Any]] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)

    def extra(self, column: str, values: Sequence[Any]) -> None:
        self.lists[column] = list(values)

    def metric(self, name: str, value: float) -> None:
        self.numbers[name] = value

    def of(self, place: int) -> dict[str, Any]:
        if not self.lists:
            return self.numbers
        return {**self.numbers, **{name: values[place] for name, values in self.lists.items() if place < len(values)}}


# ----------------------------------------------------------------------------------------------- looking at a function
def detect_signature(names: Sequence[str], reward_type: str | None) -> Signature:
    if "completions" in names or "completion_ids" in names:
        return "trl"
    if "solution_str" in names:
        return "verl"
    if reward_type not in (None, "batch", "sequential"):
        raise ValueError(f"REWARD_TYPE is {reward_type!r}; it may be 'batch' or 'sequential'")
    if reward_type == "batch" or (reward_type is None and "reward_inputs" in names):
        return "easyr1_batch"
    return "easyr1" if reward_type or "reward_input" in names else "mtrl"


def parameters(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """The names of a function's parameters, and whether it takes any keyword besides."""
    try:
        found = inspect.signature(function).parameters
    except ValueError:  # some functions written in C do not say
        return [], False
    return list(found), any(each.kind is each.VAR_KEYWORD for each in found.values())


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def mentions(function: Callable[..., Any], key: str) -> bool:
    """Whether its own code has this text as a constant, as in data["signals"]."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return isinstance(code, CodeType) and _has_constant(code, key)


def _has_constant(code: CodeType, key: str) -> bool:
    return any(c == key or (isinstance(c, CodeType) and _has_constant(c, key)) for c in code.co_consts)


def user_traceback(error: BaseException) -> str:
    """The traceback of the user's own code: our frames above it are no news."""
    place = theirs = error.__traceback__
    while place is not None:
        if place.tb_frame.f_code.co_filename == __file__:
            theirs = place.tb_next
        place = place.tb_next
    return last_words("".join(traceback.format_exception(type(error), error, theirs)))


def leave_if_forked(owner: int, error: BaseException | None = None) -> None:
    """A function may fork. Where its child comes back to us it ends, as Python would: it is no second worker."""
    if os.getpid() == owner:
        return
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    status = error.code if isinstance(error, SystemExit) else int(error is not None)
    os._exit(status if isinstance(status, int) else int(status is not None))


def as_many(answer: Any, count: int) -> Sequence[Any]:
    if isinstance(answer, (str, bytes, Mapping)) or not hasattr(answer, "__len__"):
        raise TypeError(f"a function of many responses returns a list; it returned {type(answer).__name__}")
    if len(answer) != count:
        raise ValueError(f"it returned {len(answer)} rewards for {count} responses")
    return list(answer)


# ------------------------------------------------------------------------------------------------------- sync and async
def finish(work: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine that never waits, without an event loop: a sync function may start one of its own."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waited")


def on_loop(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(work, event_loop()).result()


async def wait_for(answer: Awaitable[Any]) -> Any:
    return await answer


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """One event loop for all calls, so that a client which a function keeps open stays usable. It runs in a thread of
    its own, since the caller's thread (a notebook's) may run one already."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop
