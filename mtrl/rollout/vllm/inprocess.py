"""vLLM in this process: weights go from tensor to tensor, and nothing is copied on the way."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mtrl.protocols import Clip
from mtrl.rollout.vllm.requests import Request, Response
from mtrl.rollout.vllm.settings import prepare_environment
from mtrl.utils.errors import RunError, StartError


class VllmInProcess:
    """`arguments` are those of `vllm.LLM`; `image_arguments` those of its image processor, for each request."""

    def __init__(self, arguments: Mapping[str, Any], image_arguments: Mapping[str, Any] | None = None) -> None:
        prepare_environment()
        self.image_arguments = dict(image_arguments or {})
        self.sleeps = bool(arguments.get("enable_sleep_mode"))
        with torch_as_it_was():
            from vllm import LLM

            try:
                self.llm = LLM(**arguments)
            except Exception as error:
                raise StartError(f"vLLM does not start: {in_a_line(error)}") from error
        self.max_length: int = self.llm.llm_engine.model_config.max_model_len

    def generate(self, requests: Sequence[Request], params: Mapping[str, Any]) -> list[list[Response]]:
        from vllm import SamplingParams

        asked = [SamplingParams(**params, seed=request.seed) for request in requests]
        prompts: Any = [self._prompt(request) for request in requests]
        try:
            answers = self.llm.generate(prompts, asked, use_tqdm=False)
        except Exception as error:
            raise RunError(f"vLLM could not generate: {in_a_line(error)}") from error
        for request, answer in zip(requests, answers, strict=True):
            check_max_length(request, len(answer.prompt_token_ids or ()))
        return [[_response(output) for output in answer.outputs] for answer in answers]

    def _prompt(self, request: Request) -> dict[str, Any]:
        from PIL import Image

        media: dict[str, list[Any]] = {}
        if request.images:
            media["image"] = [Image.fromarray(image) for image in request.images]
        if request.videos:
            media["video"] = [(frames, metadata(clip)) for frames, clip in request.videos]
        if not media:
            return {"prompt_token_ids": request.ids}
        return {
            "prompt_token_ids": request.ids,
            "multi_modal_data": media,
            "mm_processor_kwargs": self.image_arguments,
        }

    @torch.no_grad()
    def load(self, label: str, tensors: Mapping[str, Tensor]) -> None:
        """By the engine's own loader: it knows where each weight of a Hugging Face checkpoint goes."""
        try:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors.items())})
            self._forget()
            self.llm.update_weight_version(label)
        except Exception as error:
            raise RunError(f"vLLM did not take the new weights: {in_a_line(error)}") from error

    def _forget(self) -> None:
        """All that was computed with the weights before: keys and values, images, and what the vision tower saw."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("its prefix cache is in use")
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def wake(self) -> None:
        if self.sleeps:
            self.llm.wake_up()

    def sleep(self) -> None:
        """The weights wait in main memory."""
        if self.sleeps:
            self.llm.sleep(level=1)

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()


def metadata(clip: Clip) -> dict[str, Any]:
    """What vLLM wants to know of frames that were chosen already."""
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


def check_max_length(request: Request, length: int) -> None:
    """An image that the engine resizes once more takes other tokens than the trainer's."""
    if length != request.length:
        raise RunError(f"vLLM reads a prompt as {length} tokens, the trainer as {request.length}: it sees other images "
                       "or another model; start it with the image settings that docs/vllm.md names")  # fmt: skip


def in_a_line(error: BaseException) -> str:
    """The first line that says something; vLLM's own are pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextmanager
def torch_as_it_was() -> Iterator[None]:
    """vLLM for CPUs takes `torch.set_num_threads` away and may change the number; the trainer wants both back."""
    setter, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = setter
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
