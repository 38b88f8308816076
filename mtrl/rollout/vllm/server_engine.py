"""vLLM behind HTTP: a server that was started as docs/vllm.md describes. Prompts and responses are tokens; weights go
through a folder in the shared memory or on the disk of the same machine."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from http.client import HTTPException
from ipaddress import ip_address
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from mtrl.rollout.vllm.inprocess import check_prompt_length
from mtrl.rollout.vllm.requests import Request, Response
from mtrl.rollout.vllm.weight_files import count_bytes, make_folder, write_weights
from mtrl.utils.errors import RunError, StartError

CONNECT_SECONDS = 30.0
RESPONSE_SECONDS = 3600.0  # a batch of long responses
CONCURRENT_REQUESTS = 64
MAX_RESPONSES = 64  # per request: servers reject more than --max-num-seqs, which is at least 128 by default
ROUNDING = 1e-4
LOWEST_BIAS = -1e9  # for tokens that are never sampled: JSON has no infinity
TOKENS = "/inference/v1/generate"
DEVELOPMENT = "VLLM_SERVER_DEV_MODE=1"
TRUSTED_NETWORK = "MTRL_TRUSTED_NETWORK"  # environment variable: other machines may reach such a server
PROBE_SECONDS = 1.0


class VllmServer:
    """`address`: host:port, or a URL. Without the development endpoints it accepts no weights, and only evaluates the
    model that it was started with."""

    sleeps = False  # it does not share devices with the trainer

    def __init__(self, address: str, model: str, dtype: torch.dtype) -> None:
        self.url = (address if "://" in address else f"http://{address}").rstrip("/")
        self.dtype = dtype
        self._folder: Path | None = None
        served = self._served()
        self.name: str = served["id"]
        self.max_length: int = served["max_model_len"]
        if Path(served["root"]).name != Path(model).name:
            raise StartError(f"worker.rollout.address: {self.url} serves {served['root']}, but the run uses {model}; "
                             "start the server with the model of the run")  # fmt: skip
        if self._status("POST", TOKENS) in (403, 404):  # with the endpoint an empty request has another error
            raise StartError(f"worker.rollout.address: {self.url} does not accept tokens; start the server with "
                             "--enable-scale-out, as in docs/vllm.md (vLLM 0.32 or newer)")  # fmt: skip
        self._check_logprobs_mode()
        self.takes_weights = self._status("GET", "/is_sleeping") == 200
        if self.takes_weights and not os.environ.get(TRUSTED_NETWORK):
            check_not_exposed(self.url)

    def _served(self) -> dict[str, Any]:
        try:
            first = self._request("GET", "/v1/models", seconds=CONNECT_SECONDS)["data"][0]
            return {name: first[name] for name in ("id", "root", "max_model_len")}
        except RunError as error:
            raise StartError(f"worker.rollout.address: {error}; is the server running?") from error
        except (KeyError, IndexError, TypeError, ValueError):
            raise StartError(f"worker.rollout.address: {self.url} answers, but is not a vLLM server") from None

    def _check_logprobs_mode(self) -> None:
        """With top_k 1 the log-prob of the only token is 0, unless it is taken from the whole distribution."""
        params = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0, "ignore_eos": True}
        try:
            result = self._request("POST", TOKENS, {"model": self.name, "token_ids": [0], "sampling_params": params})
        except RunError as error:
            raise StartError(f"worker.rollout.address: {error}") from error
        if _response(result["choices"][0]).logps[0] < -ROUNDING:
            raise StartError(f"worker.rollout.address: {self.url} returns log-probs from before top-p, top-k and "
                             "temperature; start the server with --logprobs-mode processed_logprobs")  # fmt: skip

    @property
    def no_weights(self) -> str:
        """The message if a run wants to train with a server that accepts no weights."""
        return (
            f"{self.url} was started without {DEVELOPMENT}, so it accepts no weights and can only evaluate; start it "
            "as in docs/vllm.md, or use worker.rollout.mode=process"
        )

    def generate(self, requests: Sequence[Request], params: Mapping[str, Any]) -> list[list[Response]]:
        split = [split_request(request, params["n"]) for request in requests]
        with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
            results = pool.map(lambda part: self._generate(part[0], {**params, "n": part[1]}), chain(*split))
            return [[response for _ in parts for response in next(results)] for parts in split]

    def _generate(self, request: Request, params: Mapping[str, Any]) -> list[Response]:
        bias = params["logit_bias"] and {str(token): LOWEST_BIAS for token in params["logit_bias"]}
        body: dict[str, Any] = {
            "model": self.name,
            "token_ids": request.ids,
            "sampling_params": {
                **params,
                "logit_bias": bias,
                "seed": request.seed,
                "max_tokens": request.max_tokens,
            },
            "return_token_ids": True,
        }
        if request.videos:
            raise RunError("a vLLM server accepts videos only as files, and would choose other frames; set "
                           "worker.rollout.mode=process or inprocess")  # fmt: skip
        if request.images:
            body["content_parts"] = [{"type": "image_url", "url": _data_url(image)} for image in request.images]
        result = self._request("POST", TOKENS, body)
        check_prompt_length(request, len(result["prompt_token_ids"]))
        return [_response(choice) for choice in sorted(result["choices"], key=lambda choice: int(choice["index"]))]

    def load(self, label: str, tensors: Mapping[str, Tensor]) -> None:
        if not self.takes_weights:
            raise RunError(self.no_weights)
        if self._folder is None:
            self._folder = make_folder(count_bytes(tensors, self.dtype))
            self._folder.chmod(0o755)  # the server may run as another user
        write_weights(self._folder, tensors, self.dtype)
        rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}}
        self._request("POST", "/collective_rpc", rpc)
        for cache in ("prefix", "mm", "encoder"):
            result = self._request("POST", f"/reset_{cache}_cache")
            if cache == "prefix" and not result["success"]:
                raise RunError(f"{self.url} did not empty its prefix cache, because another run uses it; give each run "
                               "its own server")  # fmt: skip
        self._request("POST", "/update_weight_version", {"new_version": label})

    def wake(self, to_load: bool = False) -> None: ...

    def sleep(self) -> None: ...

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # ----------------------------------------------------------------------------------------------------------- HTTP
    def _status(self, method: str, path: str) -> int:
        request = urllib.request.Request(self.url + path, method=method, headers=authorization())
        try:
            with urllib.request.urlopen(request, timeout=CONNECT_SECONDS) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError as error:
            raise StartError(f"worker.rollout.address: {self.url} cannot be reached: {error}") from error

    def _request(self, method: str, path: str, body: Any = None, seconds: float = RESPONSE_SECONDS) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, method=method, headers={"Content-Type": "application/json", **authorization()}
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds) as reply:
                content = reply.read()
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise RunError(f"{self.url}{path} answers {error.code}: {_error_message(text)}") from error
        except (OSError, HTTPException) as error:  # HTTPException: it ended in the middle of a reply
            reason = getattr(error, "reason", error)
            raise RunError(f"{self.url} cannot be reached: {reason}") from error
        return json.loads(content) if content else None


def authorization() -> dict[str, str]:
    """The key that the server was started with, from vLLM's own environment variable."""
    key = os.environ.get("VLLM_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def check_not_exposed(url: str) -> None:
    """Raise StartError if other machines can reach a server that accepts weights: its development endpoints run
    methods by name, and a key does not guard them."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    exposed = [address for address in public_addresses() if is_listening(address, port)]
    if exposed:
        raise StartError(
            f"worker.rollout.address: the vLLM server with {DEVELOPMENT} also answers on {exposed[0]}, where anybody "
            f"can replace its weights, with a key as well; start it with --host 127.0.0.1. If a firewall guards the "
            f"port, set {TRUSTED_NETWORK}=1"
        )


def public_addresses() -> list[str]:
    """The addresses of this machine, except those of the machine itself."""
    found: set[str] = set()
    with suppress(OSError):
        found |= {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)}
    for family, outside in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((outside, 9))  # sends nothing: the system chooses the interface
            found.add(probe.getsockname()[0])
    return sorted(address for address in found if not ip_address(address.partition("%")[0]).is_loopback)


def is_listening(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=PROBE_SECONDS).close()
    except OSError:
        return False
    return True


def split_request(request: Request, n: int) -> list[tuple[Request, int]]:
    """A request for `n` responses as several of at most MAX_RESPONSES; each response keeps its seed."""
    return [(replace(request, seed=request.seed + i), min(MAX_RESPONSES, n - i)) for i in range(0, n, MAX_RESPONSES)]


def _response(choice: Mapping[str, Any]) -> Response:
    steps = choice["logprobs"]["content"]
    versions = {span["version"] for span in choice.get("weight_versions") or ()}
    logps = [float(step["logprob"]) for step in steps]
    return Response(list(choice["token_ids"]), logps, "+".join(sorted(versions)) or None)


def _data_url(image: Any) -> str:
    """As PNG, which is lossless."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, format="PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _error_message(text: str) -> str:
    """A server's error message, in one line."""
    try:
        reply = json.loads(text)
        reply = reply.get("error", reply.get("detail", reply))
        text = str(reply.get("message", reply)) if isinstance(reply, dict) else str(reply)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:300] or "nothing"
