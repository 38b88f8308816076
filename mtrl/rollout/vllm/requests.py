"""Requests to vLLM and its responses in plain Python, the same for every host."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from mtrl.protocols import Clip, PromptEncoder
from mtrl.rollout.sampling import first_sample_numbers
from mtrl.types import Prompt, Sampling
from mtrl.utils.errors import RunError
from mtrl.utils.seeding import rng_for

SEEDS = 2**62  # vLLM adds the sample number to the seed, and the sum must fit into 64 bits
LOWEST_TEMPERATURE = 0.01  # vLLM raises lower ones to this, and only logs it
NEVER_SAMPLED = -math.inf  # a logit; vLLM's top-k on a GPU searches between the lowest and the highest finite one


@dataclass(frozen=True)
class Request:
    """A prompt with the seed of its first response; response i has seed + i."""

    ids: list[int]  # with one pad per medium: vLLM inserts the others
    images: tuple[np.ndarray, ...]  # at the size that the model sees
    length: int  # tokens with all pads
    seed: int
    max_tokens: int  # of a response
    videos: tuple[tuple[np.ndarray, Clip], ...] = ()  # the chosen frames, and their description


@dataclass(frozen=True)
class Response:
    tokens: list[int]  # with the stop token, if any
    logps: list[float]  # under the distribution sampled from
    version: str | None  # the label of the weights, as the engine reports it


class Host(Protocol):
    """An engine that runs somewhere. It raises RunError with one line. If it `sleeps`, it frees its device memory in
    `sleep`, and must be woken before `generate` and `load`."""

    sleeps: bool
    max_length: int  # tokens of a prompt and its response together

    def generate(self, requests: Sequence[Request], params: Mapping[str, Any]) -> list[list[Response]]:
        """The responses to each request, in order. `params`: the SamplingParams of all; a request has its own."""

    def load(self, label: str, tensors: Mapping[str, Tensor]) -> None:
        """Loads the weights and empties all caches. The tensors are not read after it returns."""

    def wake(self, to_load: bool = False) -> None:
        """Takes its device memory, or only what `load` needs; nothing if it has it."""

    def sleep(self) -> None: ...

    def close(self) -> None: ...


def make_requests(prompts: Sequence[Prompt], sampling: Sampling) -> list[Request]:
    """Seeds are keyed by (seed, step, task id); repeated tasks continue the sample numbers."""
    first = first_sample_numbers([prompt.task.id for prompt in prompts], sampling)
    random = [rng_for("vllm", sampling.seed, sampling.step, prompt.task.id) for prompt in prompts]
    seeds = [int(each.integers(SEEDS)) + start for each, start in zip(random, first, strict=True)]
    return [
        _make_request(prompt, seed, count_room(prompt, sampling)) for prompt, seed in zip(prompts, seeds, strict=True)
    ]


def count_room(prompt: Prompt, sampling: Sampling) -> int:
    return min(sampling.max_new_tokens, sampling.room.get(prompt.task.id, sampling.max_new_tokens))


def _make_request(prompt: Prompt, seed: int, max_tokens: int) -> Request:
    media = list(zip(prompt.media, (medium.clip for medium in prompt.task.media), strict=True))
    images = tuple(pixels for pixels, clip in media if clip is None)
    videos = tuple((pixels, clip) for pixels, clip in media if clip is not None)
    return Request(prompt.engine_ids.tolist(), images, len(prompt.ids), seed, max_tokens, videos)


def make_sampling_params(encoder: PromptEncoder, sampling: Sampling) -> dict[str, Any]:
    """One log-prob per token, that of the token itself. The encoder's stop tokens replace those of the checkpoint."""
    if 0 < sampling.temperature < LOWEST_TEMPERATURE:
        raise RunError(f"vLLM does not sample at a temperature of {sampling.temperature:g}: set {LOWEST_TEMPERATURE:g} "
                       "or more (worker.rollout.temperature, val.temperature), or 0 for greedy decoding")  # fmt: skip
    return {
        "n": sampling.n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(0, sampling.top_k),
        "stop_token_ids": sorted(encoder.stop_ids),
        "ignore_eos": True,
        "logit_bias": dict.fromkeys(encoder.forbidden_ids, NEVER_SAMPLED) or None,
        "logprobs": 0,
        "detokenize": False,
    }
