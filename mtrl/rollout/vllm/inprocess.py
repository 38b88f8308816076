"""vLLM in this process: weights are copied from tensor to tensor, without files."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mtrl.models.state_dicts import weight_forms
from mtrl.protocols import Clip
from mtrl.rollout.vllm.direct_weights import DirectWeights, Unexplained, learn_places
from mtrl.rollout.vllm.requests import Request, Response
from mtrl.rollout.vllm.settings import prepare_environment
from mtrl.rollout.vllm.sleeping_memory import MEMORY, WEIGHTS, keep_backups
from mtrl.utils.errors import RunError, StartError

logger = logging.getLogger(__name__)
TORCH_SETTINGS = (
    "TORCHINDUCTOR_COMPILE_THREADS", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
)  # fmt: skip


class VllmInProcess:
    """`arguments` are those of `vllm.LLM`; `image_arguments` those of its image processor, for each request."""

    def __init__(self, arguments: Mapping[str, Any], image_arguments: Mapping[str, Any] | None = None) -> None:
        prepare_environment()
        self.image_arguments = dict(image_arguments or {})
        self.sleeps = bool(arguments.get("enable_sleep_mode"))
        with preserve_torch_threads(), preserve_compile_settings():
            from vllm import LLM

            try:
                self.llm = LLM(**arguments)
            except Exception as error:
                raise StartError(f"vLLM does not start: {first_line(error)}") from error
        self._asleep: set[str] = set()  # parts of its memory
        self._backups = keep_backups() if self.sleeps and torch.cuda.is_available() else None
        self.max_length: int = self.llm.llm_engine.model_config.max_model_len
        self._direct: DirectWeights | None = None  # where weights go, known from the first ones on
        self._knows_places = False

    def generate(self, requests: Sequence[Request], params: Mapping[str, Any]) -> list[list[Response]]:
        from vllm import SamplingParams

        sampling = [SamplingParams(**params, seed=request.seed, max_tokens=request.max_tokens) for request in requests]
        prompts: Any = [self._prompt(request) for request in requests]
        try:
            results = self.llm.generate(prompts, sampling, use_tqdm=False)
        except Exception as error:
            raise RunError(f"vLLM could not generate: {first_line(error)}") from error
        for request, result in zip(requests, results, strict=True):
            check_prompt_length(request, len(result.prompt_token_ids or ()))
        return [[_response(output) for output in result.outputs] for result in results]

    def _prompt(self, request: Request) -> dict[str, Any]:
        from PIL import Image

        media: dict[str, list[Any]] = {}
        if request.images:
            media["image"] = [Image.fromarray(image) for image in request.images]
        if request.videos:
            media["video"] = [(frames, video_metadata(clip)) for frames, clip in request.videos]
        if not media:
            return {"prompt_token_ids": request.ids}
        return {
            "prompt_token_ids": request.ids,
            "multi_modal_data": media,
            "mm_processor_kwargs": self.image_arguments,
        }

    @torch.no_grad()
    def load(self, label: str, tensors: Mapping[str, Tensor]) -> None:
        """Copies them straight to their places, where these are known, else by the engine's own loader."""
        if self._backups is not None:
            self._backups.are_current = False
        try:
            if not self._knows_places:
                self._direct, self._knows_places = self._learn_places(tensors), True
            if self._direct is None:
                self._reload(tensors)
            else:
                self._direct.update(tensors)
            self._reset_caches()
            self.llm.update_weight_version(label)
        except Exception as error:
            raise RunError(f"vLLM did not accept the new weights: {first_line(error)}") from error

    def _learn_places(self, tensors: Mapping[str, Tensor]) -> DirectWeights | None:
        try:
            direct: DirectWeights = self.llm.collective_rpc(learn_places, args=(weight_forms(tensors),))[0]
            return direct
        except Unexplained as reason:
            expected = not torch.cuda.is_available()  # the CPU build packs weights for its kernels
            message = "new weights go through vLLM's loader, which takes longer than copying them: %s"
            logger.log(logging.INFO if expected else logging.WARNING, message, reason)
            return None

    def _reload(self, tensors: Mapping[str, Tensor]) -> None:
        """By the engine's own loader, which maps the names of a Hugging Face checkpoint."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors.items())})

    def _reset_caches(self) -> None:
        """Drops everything that was computed with the old weights: keys and values, images, vision features."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("its prefix cache is in use")
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def wake(self, to_load: bool = False) -> None:
        parts = MEMORY
        if to_load and self._direct is not None:  # vLLM's own loader may touch all memory
            parts = frozenset({WEIGHTS})
            if self._backups is not None:
                self._backups.discard(self._direct.overwritten)
        if wanted := self._asleep & parts:
            self.llm.wake_up(sorted(wanted))
            self._asleep -= wanted

    def sleep(self) -> None:
        """The weights stay in CPU memory."""
        if self.sleeps and self._asleep != MEMORY:
            self.llm.sleep(level=1)
            self._asleep = set(MEMORY)

    def close(self) -> None:
        self._direct = None  # it knows tensors of the engine
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()


def video_metadata(clip: Clip) -> dict[str, Any]:
    """vLLM's description of frames that were chosen already."""
    return {
        "fps": clip.fps,
        "duration": clip.total / clip.fps,
        "total_num_frames": clip.total,
        "frames_indices": list(clip.frames),
        "video_backend": "pyav",
        "do_sample_frames": False,
    }


def _response(output: Any) -> Response:
    tokens = list(output.token_ids)
    logps = [step[token].logprob for token, step in zip(tokens, output.logprobs, strict=True)]
    versions = {span.version for span in output.weight_versions or ()}
    return Response(tokens, logps, "+".join(sorted(versions)) or None)


def check_prompt_length(request: Request, length: int) -> None:
    """If the engine resized an image again, it would have another number of tokens."""
    if length != request.length:
        raise RunError(f"vLLM reads a prompt as {length} tokens, the trainer as {request.length}: it uses other images "
                       "or another model; start it with the image settings in docs/vllm.md")  # fmt: skip


def first_line(error: BaseException) -> str:
    """The first non-empty line of the message, since vLLM's are pages long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextmanager
def preserve_compile_settings() -> Iterator[None]:
    """vLLM leaves variables behind: when it is imported, for torch to compile with a single thread and to ask NVML for
    GPUs; when it starts, for a folder of compiled kernels that is the engine's own. The trainer's kernels would be
    compiled one after the other, and again for each engine. This restores what was set."""
    before = {name: os.environ.get(name) for name in TORCH_SETTINGS}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        config: Any = sys.modules.get("torch._inductor.config")
        if config is not None:  # it may have read the variable
            config.compile_threads = config.decide_compile_threads()


@contextmanager
def preserve_torch_threads() -> Iterator[None]:
    """vLLM for CPUs replaces `torch.set_num_threads` and may change the number; this restores both."""
    setter, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = setter
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
