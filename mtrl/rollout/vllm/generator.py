"""The Generator for vLLM: prompts in, `Rollouts` out, wherever vLLM runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from uuid import uuid4

import torch

from mtrl.protocols import PromptEncoder
from mtrl.rollout.lifecycle import EngineLifecycle
from mtrl.rollout.local import check_weight_names, explain_non_finite
from mtrl.rollout.responses import finish_reasons, make_rollouts
from mtrl.rollout.vllm.requests import Host, Response, count_room, make_requests, make_sampling_params
from mtrl.rollout.vllm.weight_names import RenamedWeights
from mtrl.types import Prompt, Rollouts, Sampling, Weights
from mtrl.utils.errors import Diverged, RunError


class VllmGenerator(EngineLifecycle):
    """`names`: all weights of the model, as the actor publishes them. `vllm_names`: beginnings of those that vLLM
    calls otherwise (`ModelFamily.vllm_names`)."""

    def __init__(
        self,
        host: Host,
        encoder: PromptEncoder,
        names: Collection[str],
        *,
        compute_dtype: torch.dtype = torch.float32,
        vllm_names: Mapping[str, str] | None = None,
    ) -> None:
        self.host, self.encoder, self.names, self.compute_dtype = host, encoder, frozenset(names), compute_dtype
        self.vllm_names = vllm_names or {}
        self.version = 0
        self._run = uuid4().hex[:8]  # a server may have weights of another run
        self._label: str | None = None  # names the loaded weights; None: those it started with
        self.host.sleep()  # a new engine is asleep

    def wake(self) -> None:
        """The host wakes when it is called: new weights have no use for the memory of keys and values."""
        torch.cuda.empty_cache()  # vLLM allocates from the driver, which has no use of the trainer's cache

    def preflight(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        self.host.wake()

    def sleep(self) -> None:
        self.host.sleep()

    def load(self, weights: Weights) -> None:
        self._check_awake()
        check_weight_names(self.names, weights.tensors)
        label = f"{self._run}:{weights.version}"
        self.host.wake(to_load=True)
        self.host.load(label, RenamedWeights(weights.tensors, self.vllm_names) if self.vllm_names else weights.tensors)
        self.version, self._label = weights.version, label

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts:
        if sampling.version != self.version:
            raise RuntimeError(f"asked to sample at version {sampling.version}, but the engine holds {self.version}")
        self._check_awake()
        self._check_lengths(prompts, sampling)
        self.host.wake()
        by_prompt = self.host.generate(make_requests(prompts, sampling), make_sampling_params(self.encoder, sampling))
        rows = [row for responses in by_prompt for row in responses]
        self._check_responses(rows)
        return make_rollouts(
            prompts,
            [index for index, responses in enumerate(by_prompt) for _ in responses],
            [row.tokens for row in rows],
            [row.logps for row in rows],
            text=[self.encoder.decode(row.tokens) for row in rows],
            finish=finish_reasons([row.tokens for row in rows], self.encoder.stop_ids),
            version=self.version,
            pad_id=self.encoder.pad_id,
        )

    def close(self) -> None:
        self.host.close()

    def _check_awake(self) -> None:
        """vLLM itself would hang."""
        if self.host.sleeps and not self.is_resident:
            raise RuntimeError("the engine sleeps; use it inside `with generator.resident()`")

    def _check_lengths(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        longest = max(prompts, key=lambda prompt: len(prompt.ids) + count_room(prompt, sampling))
        limit, new = self.host.max_length, count_room(longest, sampling)
        if len(longest.ids) + new > limit:
            raise RunError(
                f"{longest.task.origin}: a prompt of {len(longest.ids)} tokens and {new} new ones exceed the {limit} "
                "with which vLLM was started; lower dataset.max_prompt_length or worker.rollout.max_new_tokens, or "
                "raise worker.rollout.engine_kwargs.max_model_len"
            )

    def _check_responses(self, rows: Sequence[Response]) -> None:
        for row in rows:
            if not all(math.isfinite(logp) for logp in row.logps):
                raise Diverged(explain_non_finite(self.version, self.compute_dtype))
            if self._label is not None and row.version != self._label:
                raise RunError(
                    f"vLLM sampled with the weights {row.version!r} instead of {self._label!r}: another run loads "
                    "weights into the same server; give each run its own server"
                )
