"""What vLLM is asked and what it answers, in plain Python: every host takes and gives the same."""

from __future__ import annotations

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

SEEDS = 2**62  # vLLM adds the number of the sample to a seed, and both must fit into 64 bits
LOWEST_TEMPERATURE = 0.01  # vLLM raises lower ones to this, and only logs it
OUT_OF_REACH = -1e9  # a logit that is never sampled; JSON has no infinity


@dataclass(frozen=True)
class Request:
    """A prompt with the seed of its first response; response i has seed + i."""

    ids: list[int]  # one pad a medium: vLLM puts the others in, and would do so twice
    images: tuple[np.ndarray, ...]  # at the size that the model sees
    length: int  # tokens when all pads are there
    seed: int
    videos: tuple[tuple[np.ndarray, Clip], ...] = ()  # the frames that are shown, and which they are


@dataclass(frozen=True)
class Response:
    tokens: list[int]  # with the stop token, where there is one
    logps: list[float]  # under the distribution sampled from
    version: str | None  # label of the weights that the engine says it sampled with


class Host(Protocol):
    """An engine that runs somewhere. Errors are RunError, in one line. One that `sleeps` gives its device memory back
    in `sleep`, and can do nothing else then."""

    sleeps: bool
    max_length: int  # tokens of the longest prompt and response together

    def generate(self, requests: Sequence[Request], params: Mapping[str, Any]) -> list[list[Response]]:
        """The responses to each request, in order. `params`: the fields of vLLM's SamplingParams, without the seed."""

    def load(self, label: str, tensors: Mapping[str, Tensor]) -> None:
        """Weights in place, all caches that knew the old ones emptied. They are not read after it returns."""

    def wake(self) -> None: ...

    def sleep(self) -> None: ...

    def close(self) -> None: ...


def requests_for(prompts: Sequence[Prompt], sampling: Sampling) -> list[Request]:
    """Seeds are keyed by (seed, step, task id), and samples of a task that is asked again count on."""
    first = first_sample_numbers([prompt.task.id for prompt in prompts], sampling)
    return [_request(prompt, base_seed(prompt, sampling) + start) for prompt, start in zip(prompts, first, strict=True)]


def _request(prompt: Prompt, seed: int) -> Request:
    media = list(zip(prompt.media, (medium.clip for medium in prompt.task.media), strict=True))
    images = tuple(pixels for pixels, clip in media if clip is None)
    videos = tuple((pixels, clip) for pixels, clip in media if clip is not None)
    return Request(prompt.engine_ids.tolist(), images, len(prompt.ids), seed, videos)


def base_seed(prompt: Prompt, sampling: Sampling) -> int:
    return int(rng_for("vllm", sampling.seed, sampling.step, prompt.task.id).integers(SEEDS))


def params_for(encoder: PromptEncoder, sampling: Sampling) -> dict[str, Any]:
    """One log-prob a token: that of the token itself. What ends a response is ours to say, not a checkpoint's."""
    if 0 < sampling.temperature < LOWEST_TEMPERATURE:
        raise RunError(f"vLLM does not sample at a temperature of {sampling.temperature:g}: set {LOWEST_TEMPERATURE:g} "
                       "or more (worker.rollout.temperature, val.temperature), or 0, which is greedy")  # fmt: skip
    return {
        "n": sampling.n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(0, sampling.top_k),
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": sorted(encoder.stop_ids),
        "ignore_eos": True,
        "logit_bias": dict.fromkeys(encoder.forbidden_ids, OUT_OF_REACH) or None,
        "logprobs": 0,
        "detokenize": False,
    }
