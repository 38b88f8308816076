"""The engine of the Generator seam: prompts in, `Rollouts` out, wherever vLLM runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from uuid import uuid4

import torch

from mtrl.protocols import PromptEncoder
from mtrl.rollout.lifecycle import EngineLifecycle
from mtrl.rollout.local import non_finite
from mtrl.rollout.responses import finish_reasons, make_rollouts
from mtrl.rollout.vllm.requests import Host, Response, params_for, requests_for
from mtrl.rollout.weight_checks import check_weight_names
from mtrl.types import Prompt, Rollouts, Sampling, Weights
from mtrl.utils.errors import Diverged, RunError


class VllmGenerator(EngineLifecycle):
    """Samples by a host of vLLM. `names`: all weights of the model, as the actor publishes them."""

    def __init__(
        self, host: Host, encoder: PromptEncoder, names: Collection[str], *,
        compute_dtype: torch.dtype = torch.float32, version: int = 0,
    ) -> None:  # fmt: skip
        self.host, self.encoder, self.names, self.compute_dtype = host, encoder, frozenset(names), compute_dtype
        self.version = version
        self._run = uuid4().hex[:8]  # a server may have been given weights by another run
        self._label: str | None = None  # of the weights that we loaded; None: those it started with
        self.host.sleep()  # an engine is made asleep

    def wake(self) -> None:
        self.host.wake()

    def sleep(self) -> None:
        self.host.sleep()

    def load(self, weights: Weights) -> None:
        self._refuse_asleep()
        check_weight_names(self.names, weights.tensors)
        label = f"{self._run}:{weights.version}"
        self.host.load(label, weights.tensors)
        self.version, self._label = weights.version, label

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts:
        if sampling.version != self.version:
            raise RuntimeError(f"asked to sample at version {sampling.version}, but the engine holds {self.version}")
        self._refuse_asleep()
        self._refuse_long(prompts, sampling.max_new_tokens)
        answers = self.host.generate(requests_for(prompts, sampling), params_for(self.encoder, sampling))
        rows = [row for answer in answers for row in answer]
        self._refuse_wrong(rows)
        return make_rollouts(
            prompts,
            [place for place, answer in enumerate(answers) for _ in answer],
            [row.tokens for row in rows],
            [row.logps for row in rows],
            text=[self.encoder.decode(row.tokens) for row in rows],
            finish=finish_reasons([row.tokens for row in rows], self.encoder.stop_ids),
            version=self.version,
            pad_id=self.encoder.pad_id,
        )

    def close(self) -> None:
        self.host.close()

    def _refuse_asleep(self) -> None:
        """vLLM itself would wait for ever."""
        if self.host.sleeps and not self.is_resident:
            raise RuntimeError("the engine sleeps; use it inside `with generator.awake()`")

    def _refuse_long(self, prompts: Sequence[Prompt], new: int) -> None:
        longest, limit = max(prompts, key=lambda prompt: len(prompt.ids)), self.host.max_length
        if len(longest.ids) + new > limit:
            raise RunError(
                f"{longest.task.origin}: a prompt of {len(longest.ids)} tokens and {new} new ones are more than the "
                f"{limit} that vLLM was started for; lower dataset.max_prompt_length or worker.rollout.max_new_tokens, "
                "or raise worker.rollout.engine_kwargs.max_model_len"
            )

    def _refuse_wrong(self, rows: Sequence[Response]) -> None:
        for row in rows:
            if not all(math.isfinite(logp) for logp in row.logps):
                raise Diverged(non_finite(self.version, self.compute_dtype))
            if self._label is not None and row.version != self._label:
                raise RunError(
                    f"vLLM sampled with the weights {row.version!r} instead of {self._label!r}: somebody else gives "
                    "weights to the same server; let each run have its own"
                )
