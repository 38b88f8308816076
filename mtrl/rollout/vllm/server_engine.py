"""vLLM behind HTTP: a server that somebody started as docs/vllm.md says. Tokens go in and come out; weights reach it by
a folder in the memory or on the disk of one machine."""

from __future__ import annotations

import base64
import io
import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPException
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtrl.rollout.vllm.inprocess import check_max_length
from mtrl.rollout.vllm.requests import Request, Response
from mtrl.rollout.vllm.weight_files import new_folder, tensor_bytes, write_weights
from mtrl.utils.errors import RunError, StartError

CONNECT_SECONDS = 30.0
ANSWER_SECONDS = 3600.0  # a batch of long responses
AT_ONCE = 64  # requests that wait for their responses
RESPONSES = 64  # of a request: servers refuse more than --max-num-seqs, 128 or more unless told
ROUNDING = 1e-4
TOKENS = "/inference/v1/generate"
DEVELOPMENT = "VLLM_SERVER_DEV_MODE=1"


class VllmServer:
    """`address`: host:port, or a whole URL. Without the development endpoints it cannot be given weights: it then
    serves the evaluation of the model that it was started with."""

    sleeps = False  # its device memory is its own

    def __init__(self, address: str, model: str, dtype: torch.dtype) -> None:
        self.url = (address if "://" in address else f"http://{address}").rstrip("/")
        self.dtype = dtype
        self._folder: Path | None = None
        served = self._served()
        self.name: str = served["id"]
        self.max_length: int = served["max_model_len"]
        if Path(served["root"]).name != Path(model).name:
            raise StartError(f"worker.rollout.address: {self.url} serves {served['root']}, the run has {model}; start "
                             "the server with the model of the run")  # fmt: skip
        if self._status("POST", TOKENS) in (403, 404):  # an empty request is a wrong one where they are open
            raise StartError(f"worker.rollout.address: {self.url} takes no tokens; start the server with "
                             "--enable-scale-out, as docs/vllm.md says (vLLM 0.32 or newer)")  # fmt: skip
        self._refuse_raw()
        self.takes_weights = self._status("GET", "/is_sleeping") == 200

    def _served(self) -> dict[str, Any]:
        try:
            first = self._ask("GET", "/v1/models", seconds=CONNECT_SECONDS)["data"][0]
            return {name: first[name] for name in ("id", "root", "max_model_len")}
        except RunError as error:
            raise StartError(f"worker.rollout.address: {error}; is the server running?") from error
        except (KeyError, IndexError, TypeError, ValueError):
            raise StartError(f"worker.rollout.address: {self.url} answers, but is no server of vLLM") from None

    def _refuse_raw(self) -> None:
        """Of the one token that is left by top_k 1 the log-prob is 0, unless it is that of the whole distribution."""
        params = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0, "ignore_eos": True}
        try:
            answer = self._ask("POST", TOKENS, {"model": self.name, "token_ids": [0], "sampling_params": params})
        except RunError as error:
            raise StartError(f"worker.rollout.address: {error}") from error
        if _response(answer["choices"][0]).logps[0] < -ROUNDING:
            raise StartError(f"worker.rollout.address: {self.url} gives log-probs from before top-p, top-k and "
                             "temperature; start the server with --logprobs-mode processed_logprobs")  # fmt: skip

    @property
    def no_weights(self) -> str:
        """What to say to those who want to train with a server that cannot."""
        return (
            f"{self.url} was started without {DEVELOPMENT}, so it takes no weights and serves evaluation alone; start "
            "it as docs/vllm.md says, or use worker.rollout.mode=process"
        )

    def generate(self, requests: Sequence[Request], params: Mapping[str, Any]) -> list[list[Response]]:
        parts = [cut(request, params["n"]) for request in requests]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = pool.map(lambda part: self._generate(part[0], {**params, "n": part[1]}), chain(*parts))
            return [[each for _ in here for each in next(found)] for here in parts]

    def _generate(self, request: Request, params: Mapping[str, Any]) -> list[Response]:
        bias = params["logit_bias"] and {str(token): value for token, value in params["logit_bias"].items()}
        body: dict[str, Any] = {
            "model": self.name,
            "token_ids": request.ids,
            "sampling_params": {**params, "logit_bias": bias, "seed": request.seed},
            "return_token_ids": True,
        }
        if request.videos:
            raise RunError("a server of vLLM takes videos as files alone, and would choose other frames of them; set "
                           "worker.rollout.mode=process, or inprocess")  # fmt: skip
        if request.images:
            body["content_parts"] = [{"type": "image_url", "url": _data_url(image)} for image in request.images]
        answer = self._ask("POST", TOKENS, body)
        check_max_length(request, len(answer["prompt_token_ids"]))
        return [_response(choice) for choice in sorted(answer["choices"], key=lambda choice: int(choice["index"]))]

    def load(self, label: str, tensors: Mapping[str, Tensor]) -> None:
        if not self.takes_weights:
            raise RunError(self.no_weights)
        if self._folder is None:
            self._folder = new_folder(tensor_bytes(tensors, self.dtype))
            self._folder.chmod(0o755)  # the server may run as another user
        write_weights(self._folder, tensors, self.dtype)
        rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}}
        self._ask("POST", "/collective_rpc", rpc)
        for cache in ("prefix", "mm", "encoder"):
            answer = self._ask("POST", f"/reset_{cache}_cache")
            if cache == "prefix" and not answer["success"]:
                raise RunError(f"{self.url} did not empty its prefix cache: somebody else uses it; let each run have "
                               "its own")  # fmt: skip
        self._ask("POST", "/update_weight_version", {"new_version": label})

    def wake(self) -> None:
        """It is always awake."""

    def sleep(self) -> None:
        """Its device is not the trainer's."""

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # ----------------------------------------------------------------------------------------------------------- HTTP
    def _status(self, method: str, path: str) -> int:
        request = urllib.request.Request(self.url + path, method=method)
        try:
            with urllib.request.urlopen(request, timeout=CONNECT_SECONDS) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError as error:
            raise StartError(f"worker.rollout.address: {self.url} cannot be reached: {error}") from error

    def _ask(self, method: str, path: str, body: Any = None, seconds: float = ANSWER_SECONDS) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, method=method, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")
            raise RunError(f"{self.url}{path} answers {error.code}: {_message(said)}") from error
        except (OSError, HTTPException) as error:  # HTTPException: it ended in the middle of an answer
            reason = getattr(error, "reason", error)
            raise RunError(f"{self.url} cannot be reached: {reason}") from error
        return json.loads(content) if content else None


def cut(request: Request, n: int) -> list[tuple[Request, int]]:
    """The request for `n` responses as several, none of them for more than a server takes: a response has the seed of
    its place, whichever it comes with."""
    return [(replace(request, seed=request.seed + i), min(RESPONSES, n - i)) for i in range(0, n, RESPONSES)]


def _response(choice: Mapping[str, Any]) -> Response:
    steps = choice["logprobs"]["content"]
    versions = {span["version"] for span in choice.get("weight_versions") or ()}
    logps = [float(step["logprob"]) for step in steps]
    return Response(list(choice["token_ids"]), logps, "+".join(sorted(versions)) or None)


def _data_url(image: Any) -> str:
    """As PNG, which loses nothing."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, format="PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _message(said: str) -> str:
    """What a server says of an error, in a line."""
    try:
        told = json.loads(said)
        told = told.get("error", told.get("detail", told))
        said = str(told.get("message", told)) if isinstance(told, dict) else str(told)
    except (ValueError, AttributeError):
        pass
    return " ".join(said.split())[:300] or "nothing"
