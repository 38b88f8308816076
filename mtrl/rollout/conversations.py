"""Responses of several turns: the model calls tools of its environment, reads what they give, and continues.

Any engine samples the turns. A response that waits for its tools does not hold up others: whoever is ready continues
in the engine's next call (unless there is a barrier). A turn continues the prompt, all own tokens and all messages so
far, token by token; nothing is tokenized again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtrl.environments.pool import EnvironmentPool, Session
from mtrl.environments.records import Block, RolloutKey, ToolResult
from mtrl.environments.sessions import Sessions
from mtrl.environments.tool_calls import parse_tool_calls
from mtrl.models.turns import conversation
from mtrl.protocols import Generator, PromptEncoder
from mtrl.rollout.responses import make_rollouts
from mtrl.rollout.sampling import first_sample_numbers
from mtrl.types import EnvironmentTurn, FinishReason, Medium, Observations, Prompt, Rollouts, Sampling, Weights
from mtrl.utils.errors import RunError
from mtrl.utils.images import resize_image

GREEDY = -1  # the sample number of a greedy response, which is not one of the sampled ones
LINGER = 0.02  # seconds in which results that come together are waited for


@dataclass(eq=False)
class Conversation:
    """A response that grows turn by turn."""

    id: str
    prompt: Prompt
    session: Session
    limit: int  # of its tokens, those of messages included
    tokens: list[Tensor] = field(default_factory=list)  # of each turn
    logprobs: list[Tensor] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    turns: list[EnvironmentTurn] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    results: Sequence[Future[ToolResult]] = ()  # of the last turn's calls

    @property
    def observations(self) -> Observations:
        return Observations(self.id, tuple(self.turns))

    @property
    def room(self) -> int:
        return self.limit - sum(map(len, self.tokens)) - sum(len(turn.message.ids) for turn in self.turns)

    @property
    def so_far(self) -> Prompt:
        """What the next turn continues."""
        return conversation(self.observations, self.prompt, torch.cat(self.tokens))

    def add(self, rollouts: Rollouts, row: int) -> None:
        """A turn that an engine has sampled. It may have had more room than this response."""
        length = int(rollouts.mask[row].sum())
        room = self.room
        self.tokens.append(rollouts.tokens[row, : min(length, room)])
        self.logprobs.append(rollouts.rollout_logprobs[row, : min(length, room)])
        self.texts.append(rollouts.text[row])
        self.finish_reason = rollouts.finish_reason[row] if length <= room else "length"

    def answer(self, encoder: PromptEncoder) -> bool:
        """Take what the tools gave as the next message; whether the response continues. A message that leaves no room
        for another token is dropped, and the response ends at its limit."""
        results = [future.result() for future in self.results]
        own, id = torch.cat(self.tokens), f"{self.id}.{len(self.turns)}"
        errors = sum(result.error is not None for result in results)
        try:
            message = encoder.encode_message(join_contents(results), int(own[-1]), id)
        except ValueError as error:  # such as an image that the model cannot take
            errors = len(results)
            message = encoder.encode_message([str({"error": str(error)})], int(own[-1]), id)
        if len(message.ids) >= self.room:
            self.finish_reason = "length"
            return False
        self.turns.append(
            EnvironmentTurn(
                len(own),
                message,
                tuple(result.name for result in results),
                errors,
                max(result.waited for result in results),
            )
        )
        return True


@dataclass
class ConversationGenerator:
    """A generator around an engine. `make_row`: the columns that an environment's `reset` gets. With a `barrier` a turn
    begins when the tools of all responses are done: the engine's batches, and with them the rounding of log-probs, then
    do not depend on how long tools take."""

    engine: Generator
    encoder: PromptEncoder
    pool: EnvironmentPool
    sessions: Sessions
    make_row: Callable[[Prompt], Mapping[str, Any]]
    max_turns: int  # messages of a response
    barrier: bool = False

    def __post_init__(self) -> None:
        self.colocated = self.engine.colocated

    # ------------------------------------------------------------------------------------------------ the whole rollout
    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts:
        self.sessions.begin_call()
        conversations = self._open(prompts, sampling)
        first = self.engine.generate([group[0].prompt for group in conversations], sampling)
        rows = [each for group in conversations for each in group]
        for row, each in enumerate(rows):
            each.add(first, row)
        self._continue(rows, sampling)
        return make_rollouts(
            [group[0].prompt for group in conversations],
            first.group.tolist(),
            [torch.cat(each.tokens) for each in rows],
            [torch.cat(each.logprobs) for each in rows],
            text=["\n".join(each.texts) for each in rows],
            finish=[each.finish_reason for each in rows],
            version=sampling.version,
            pad_id=self.encoder.pad_id,
            observations=[each.observations for each in rows],
        )

    def _open(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Conversation]]:
        """The conversations of each prompt, which all begin in the same way."""
        first = first_sample_numbers([prompt.task.id for prompt in prompts], sampling)
        groups = []
        for prompt, number in zip(prompts, first, strict=True):
            row, task = self.make_row(prompt), prompt.task.id
            samples = range(number, number + sampling.n) if sampling.temperature else [GREEDY - number]
            keys = [RolloutKey(sampling.seed, sampling.step, task, sample) for sample in samples]
            sessions = self.pool.open([row] * len(keys), keys)
            groups.append(
                [(f"{task}#{key.sample}", each, each.reset()) for key, each in zip(keys, sessions, strict=True)]
            )
        opened = []
        for prompt, group in zip(prompts, groups, strict=True):
            shown = self._begin_prompt(prompt, [reset.result() for _, _, reset in group])
            opened.append([Conversation(id, shown, each, sampling.max_new_tokens) for id, each, _ in group])
            for id, each, _ in group:
                self.sessions.add(id, each)
        return opened

    def _begin_prompt(self, prompt: Prompt, resets: Sequence[ToolResult]) -> Prompt:
        """The prompt with what the environments say at the beginning, which must be the same for all responses."""
        origin, first = prompt.task.origin, resets[0]
        if failed := next((each for each in resets if each.error is not None), None):
            raise RunError(f"{origin}: reset of the environment failed: {failed.text}\n{failed.output}".strip())
        if any(not is_equal(each.content, first.content) for each in resets):
            raise RunError(
                f"{origin}: reset gave different contents for the responses to one prompt, which share it; make it "
                "depend on the row, the seed it declares, or random numbers alone"
            )
        if not first.content:
            return prompt
        try:
            return extend_prompt(self.encoder, prompt, first.content)
        except ValueError as error:  # such as an image that the model cannot take
            raise RunError(f"{origin}: what reset of the environment says cannot be shown: {error}") from error

    # ---------------------------------------------------------------------------------------------------- turn by turn
    def _continue(self, rows: Sequence[Conversation], sampling: Sampling) -> None:
        """Sample all further turns: those that are ready together, while tools of others still run."""
        waiting = [each for each in rows if self._call(each)]
        while waiting:
            ready = waiting if self.barrier else wait_for_some(waiting)
            waiting = [each for each in waiting if each not in ready]
            if going := [each for each in ready if each.answer(self.encoder)]:
                prompts = [each.so_far for each in going]
                room = {prompt.task.id: each.room for prompt, each in zip(prompts, going, strict=True)}
                once = replace(sampling, n=1, max_new_tokens=max(room.values()), room=room, times_sampled={})
                turn = self.engine.generate(prompts, once)
                for row, each in enumerate(going):
                    each.add(turn, row)
                waiting += [each for each in going if self._call(each)]

    def _call(self, response: Conversation) -> bool:
        """Start the calls of the last turn; False if it makes none, or may make none."""
        if response.finish_reason != "stop" or len(response.turns) >= self.max_turns:
            return False
        calls = parse_tool_calls(response.texts[-1], response.session.schemas)
        response.results = self.pool.call([(response.session, call) for call in calls])
        return bool(calls)

    # ------------------------------------------------------------------------------------------------------ the engine
    def resident(self) -> AbstractContextManager[None]:
        return self.engine.resident()

    def begin(self, prompts: Sequence[Prompt], sampling: Sampling) -> Callable[[], Rollouts]:
        rollouts = self.generate(prompts, sampling)
        return lambda: rollouts

    def preflight(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        self.engine.preflight(prompts, sampling)

    def load(self, weights: Weights) -> None:
        self.engine.load(weights)

    def close(self) -> None:
        self.engine.close()


def join_contents(results: Sequence[ToolResult]) -> list[Block]:
    """The results of a turn's calls, each on a line of its own."""
    blocks: list[Block] = []
    for result in results:
        blocks += ["\n", *result.content] if blocks else result.content
    return blocks


def extend_prompt(encoder: PromptEncoder, prompt: Prompt, content: Sequence[Block]) -> Prompt:
    """The prompt with these texts and images at the end of its last message."""
    images = [block for block in content if not isinstance(block, str)]
    *before, last = prompt.task.messages
    said = last["content"]
    parts: list[Mapping[str, Any]] = [{"type": "text", "text": said}] if isinstance(said, str) else list(said)
    parts += [{"type": "text", "text": each} if isinstance(each, str) else {"type": "image"} for each in content]
    media = (*prompt.task.media, *(Medium("image", None) for _ in images))
    task = replace(prompt.task, messages=(*before, {**last, "content": parts}), media=media)
    resized = (resize_image(image, *encoder.target_size(*image.shape[:2])) for image in images)
    return encoder.encode(task, [*prompt.media, *resized])


def wait_for_some(conversations: Sequence[Conversation]) -> list[Conversation]:
    """Those whose results are all there: at least one, and what comes with it."""
    while not any(map(all_done, conversations)):
        wait([next(e for e in each.results if not e.done()) for each in conversations], return_when=FIRST_COMPLETED)
    wait([future for each in conversations for future in each.results], timeout=LINGER)
    return [each for each in conversations if all_done(each)]


def all_done(response: Conversation) -> bool:
    return all(future.done() for future in response.results)


def is_equal(first: Sequence[Block], second: Sequence[Block]) -> bool:
    return len(first) == len(second) and all(
        a == b if isinstance(a, str) or isinstance(b, str) else np.array_equal(a, b)
        for a, b in zip(first, second, strict=True)
    )
