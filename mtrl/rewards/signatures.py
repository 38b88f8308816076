"""Signatures of reward functions (SPEC 3): ours, TRL's, EasyR1's and verl's, sync or async. Imports nothing heavy.

    reward_function(data)                                              one response: a dict with all its fields
    f(prompts, completions, completion_ids, **columns)                 TRL: many responses, a list of rewards
    compute_score(reward_inputs) or compute_score(reward_input)        EasyR1: many or one
    compute_score(data_source, solution_str, ground_truth, extra_info) verl: one

The names of the parameters decide. A function that has the parameter `signals`, or reads that key, gets the signals.
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

from mtrl.rewards.outcomes import Outcome, read_outcome
from mtrl.sandbox.plain_text import sanitize_tail
from mtrl.sandbox.worker_start import exit_if_forked

Sample = Mapping[str, Any]
Signature = Literal["mtrl", "trl", "easyr1", "easyr1_batch", "verl"]
CallArguments = tuple[list[Any], dict[str, Any]]  # positional and keyword arguments of a call
Report = Callable[[int, Outcome], object]

TRAINER = (
    " is never given: a reward runs in another process. It may ask for trainer_state (global_step, max_steps), "
    "log_extra, log_metric, completion_ids, signals and every column of the data"
)
NOT_COLUMNS = {"prompt", "prompt_messages", "response", "response_token_ids", "signals", "trainer_state",
               "rollout_id"}  # fmt: skip


@dataclass(frozen=True)
class Traits:
    """How a function must be called."""

    batch: bool  # a call takes many samples, in whole groups
    concurrent: bool  # async: the samples of a message run concurrently
    signals: bool  # it reads the signals
    name: str | None = None  # REWARD_NAME of its module


class UserReward:
    """Calls a user's function in its signature. `seconds` limits a single async call; the sandbox limits the others."""

    def __init__(
        self,
        function: Callable[..., Any],
        kwargs: Mapping[str, Any],
        module: object | None = None,
        seconds: float | None = None,
    ) -> None:
        names, self.takes_any = parameters(function)
        module = module or sys.modules.get(getattr(function, "__module__", ""))
        name = getattr(module, "REWARD_NAME", None)
        self.function, self.kwargs, self.names, self.seconds = function, dict(kwargs), names, seconds
        self.signature = detect_signature(names, getattr(module, "REWARD_TYPE", None))
        self.out_of_memory, self.process = False, os.getpid()
        self.traits = Traits(
            batch=self.signature in ("trl", "easyr1_batch"),
            concurrent=any(map(inspect.iscoroutinefunction, (function, type(function).__call__))),
            signals="signals" in names or has_constant(function, "signals"),
            name=None if name is None else str(name),
        )
        self._check_parameters()

    def _check_parameters(self) -> None:
        """Raise an error before a run if no response could be passed to the function. TRL's columns are not known
        yet."""
        try:
            signature = inspect.signature(self.function, follow_wrapped=False)
        except ValueError:
            return
        needs = signature.parameters.get("trainer")
        if self.signature == "trl" and needs and needs.default is needs.empty and "trainer" not in self.kwargs:
            raise ValueError(f"its parameter trainer{TRAINER}")
        positional, named = next(self._arguments([{"response": ""}], TrlLog()))
        try:
            (signature.bind_partial if self.signature == "trl" else signature.bind)(*positional, **named, **self.kwargs)
        except TypeError as error:
            form = {"trl": "f(completions, ..)", "verl": "f(data_source, solution_str, ground_truth, extra_info)"}
            raise ValueError(
                f"it cannot be called as {form.get(self.signature, 'f(data)')}, the form that its parameters imply, "
                f"with the keyword arguments {sorted(self.kwargs)} of reward_fn_kwargs: {error}"
            ) from None

    def score(self, samples: Sequence[Sample], report: Report) -> None:
        """Report (index, outcome) as soon as each is known; an exception of the function becomes a failure."""
        if self.traits.batch:
            for index, outcome in enumerate(self._run(self._outcomes(samples))):
                report(index, outcome)
        elif self.traits.concurrent:
            self._run(self._score_concurrently(samples, report))
        else:
            for index, sample in enumerate(samples):
                report(index, self._run(self._outcomes([sample]))[0])

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return run_on_loop(work) if self.traits.concurrent else run_without_loop(work)

    async def _score_concurrently(self, samples: Sequence[Sample], report: Report) -> None:
        async def score_one(index: int, sample: Sample) -> None:
            report(index, (await self._outcomes([sample]))[0])

        await asyncio.gather(*(score_one(index, sample) for index, sample in enumerate(samples)))

    async def _outcomes(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Call the function once; return one outcome per sample."""
        begin, log = time.perf_counter(), TrlLog()
        try:
            call = self._call(samples, log)
            value = await (asyncio.wait_for(call, self.seconds) if self.traits.concurrent else call)
            values = check_rewards(value, len(samples)) if self.traits.batch else [value]
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            exit_if_forked(self.process, error)
            self.out_of_memory |= isinstance(error, MemoryError)
            failure, seconds = user_traceback(error), time.perf_counter() - begin
            if isinstance(error, KeyError) and error.args == ("trainer",):
                failure += f"\nkwargs['trainer']{TRAINER}"
            if isinstance(error, asyncio.TimeoutError) and self.seconds and seconds >= self.seconds:
                failure = f"took longer than {self.seconds:g} s"
            return [Outcome(failure=failure, seconds=seconds / len(samples))] * len(samples)
        exit_if_forked(self.process)
        seconds = (time.perf_counter() - begin) / len(samples)
        return [read_outcome(each, seconds, log.values_for(index)) for index, each in enumerate(values)]

    async def _call(self, samples: Sequence[Sample], log: TrlLog) -> Any:
        """Try each form of arguments until the function accepts its types; otherwise raise the first error."""
        first_error: Exception | None = None
        for positional, named in self._arguments(samples, log):
            try:
                value = self.function(*positional, **named, **self.kwargs)
                if not inspect.isawaitable(value):
                    return value
                return await value if self.traits.concurrent else run_on_loop(wait_for(value))
            except (TypeError, AttributeError) as error:
                first_error = first_error or error
        assert first_error is not None
        raise first_error

    def _arguments(self, samples: Sequence[Sample], log: TrlLog) -> Iterator[CallArguments]:
        for positional, available in make_arguments(self.signature, samples, log):
            if "signals" in self.names:
                signals = [sample.get("signals", {}) for sample in samples]
                available = {**available, "signals": signals if self.traits.batch else signals[0]}
            named = {name: value for name, value in available.items() if self.takes_any or name in self.names}
            yield positional, {name: value for name, value in named.items() if name not in self.kwargs}


# -------------------------------------------------------------------------------------------------- the four signatures
def make_arguments(signature: Signature, samples: Sequence[Sample], log: TrlLog) -> list[CallArguments]:
    """Return the arguments of a call, and other forms to try if the function does not accept their types."""
    if signature == "trl":
        return trl_arguments(samples, log)
    if signature == "verl":
        return [([], verl_arguments(samples[0]))]
    if signature == "mtrl":
        return [([dict(samples[0])], {})]
    inputs = [{**sample, "response_length": len(sample.get("response_token_ids", ()))} for sample in samples]
    return [([inputs if signature == "easyr1_batch" else inputs[0]], {})]


def verl_arguments(sample: Sample) -> dict[str, Any]:
    """`extra_info` has every column, updated by the row's own extra_info."""
    own = sample.get("extra_info")
    return {
        "data_source": sample.get("data_source", sample.get("source", "")),
        "solution_str": sample["response"],
        "ground_truth": sample.get("ground_truth"),
        "extra_info": {**sample, **own} if isinstance(own, Mapping) else dict(sample),
    }


def trl_arguments(samples: Sequence[Sample], log: TrlLog) -> list[CallArguments]:
    """As in TRL, chat prompts give messages and text prompts give texts. The other form is tried second: many functions
    are written for chats, and a row here need not be one."""
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
    are_chats = all(sample.get("prompt_messages") for sample in samples)
    forms = (chats, texts) if are_chats else (texts, chats)
    return [([], {**shared, **form}) for form in forms]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@dataclass
class TrlLog:
    """Records TRL's `log_extra` (a list with one value per response) and `log_metric` (one number)."""

    lists: dict[str, list[Any]] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)

    def extra(self, column: str, values: Sequence[Any]) -> None:
        self.lists[column] = list(values)

    def metric(self, name: str, value: float) -> None:
        self.numbers[name] = value

    def values_for(self, index: int) -> dict[str, Any]:
        if not self.lists:
            return self.numbers
        return {**self.numbers, **{name: values[index] for name, values in self.lists.items() if index < len(values)}}


# ----------------------------------------------------------------------------------------------- inspecting a function
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
    """Return the names of a function's parameters, and whether it takes any keyword argument."""
    try:
        signature = inspect.signature(function).parameters
    except ValueError:  # some functions written in C have no signature
        return [], False
    return list(signature), any(each.kind is each.VAR_KEYWORD for each in signature.values())


def has_constant(function: Callable[..., Any], key: str) -> bool:
    """Whether its own code contains this string, as in data["signals"]."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return isinstance(code, CodeType) and _code_has_constant(code, key)


def _code_has_constant(code: CodeType, key: str) -> bool:
    return any(c == key or (isinstance(c, CodeType) and _code_has_constant(c, key)) for c in code.co_consts)


def user_traceback(error: BaseException) -> str:
    """Format the traceback of the user's own code, without our frames above it."""
    frame = theirs = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == __file__:
            theirs = frame.tb_next
        frame = frame.tb_next
    return sanitize_tail("".join(traceback.format_exception(type(error), error, theirs)))


def check_rewards(value: Any, count: int) -> Sequence[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__"):
        raise TypeError(f"a function of many responses returns a list; it returned {type(value).__name__}")
    if len(value) != count:
        raise ValueError(f"it returned {len(value)} rewards for {count} responses")
    return list(value)


# ------------------------------------------------------------------------------------------------------- sync and async
def run_without_loop(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits without an event loop, since a sync function may start its own."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waited")


def run_on_loop(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(work, event_loop()).result()


async def wait_for(value: Awaitable[Any]) -> Any:
    return await value


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return one event loop for all calls, so that a client that a function keeps open stays usable. It runs in its own
    thread, since the caller's thread (of a notebook) may run a loop already."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop
