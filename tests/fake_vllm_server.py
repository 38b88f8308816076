"""A fake vLLM server: a small HTTP server with vLLM's endpoints, which samples nothing."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from safetensors.torch import load_file


class FakeServer(ThreadingHTTPServer):
    """`development`: whether it has the endpoints for weights; `tokens`: the endpoint for tokens; `raw`: whether its
    log-probs are those of the whole distribution."""

    def __init__(
        self, development=True, model="models/tiny", prompt_lengths=(3, 6), tokens=True, raw=False, host="127.0.0.1",
        key=None,
    ):  # fmt: skip
        self.development, self.model, self.lengths, self.asked, self.label = development, model, prompt_lengths, [], "0"
        self.busy, self.tokens, self.raw = False, tokens, raw
        self.key = key
        super().__init__((host, 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self):
        return f"127.0.0.1:{self.server_port}"

    def read_length(self, body):
        return self.lengths[bool(body.get("content_parts"))]

    def sample(self, seed, number):
        return [seed, number]


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        return

    def answer(self, code, body):
        content = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def is_denied(self):
        if self.server.key is None or self.headers.get("Authorization") == f"Bearer {self.server.key}":
            return False
        self.answer(401, {"error": "Unauthorized"})
        return True

    def do_GET(self):
        if self.is_denied():
            return
        if self.path == "/v1/models":
            self.answer(200, {"data": [{"id": "served", "root": self.server.model, "max_model_len": 99}]})
        elif self.path == "/is_sleeping" and self.server.development:
            self.answer(200, {"is_sleeping": False})
        else:
            self.answer(404, {"detail": "Not Found"})

    def do_POST(self):
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.is_denied():
            return
        body = json.loads(sent) if sent else None
        if self.path == "/inference/v1/generate" and not (body and self.server.tokens):
            self.answer(422 if self.server.tokens else 403, {"detail": "no"})
            return
        if body and body.get("sampling_params", {}).get("top_k") == 1:
            step = {"token_id": 7, "logprob": -0.5 if self.server.raw else 0.0}
            self.answer(200, {"choices": [{"index": 0, "token_ids": [7], "logprobs": {"content": [step]}}]})
            return
        self.server.asked.append((self.path, body))
        if self.path == "/inference/v1/generate":
            length = self.server.read_length(body)
            seed = body["sampling_params"]["seed"]
            choice = {
                "logprobs": {"content": [{"token_id": 7, "logprob": -0.5}, {"token_id": 2, "logprob": -1.5}]},
                "weight_versions": [{"version": self.server.label, "start": 0, "end": 2}],
            }
            backwards = reversed(range(body["sampling_params"]["n"]))  # in any order
            rows = [{**choice, "index": i, "token_ids": self.server.sample(seed, i)} for i in backwards]
            self.answer(200, {"prompt_token_ids": list(range(length)), "choices": rows})
        elif self.path == "/update_weight_version":
            self.server.label = body["new_version"]
            self.answer(200, {})
        elif self.path == "/collective_rpc":
            folder = Path(body["kwargs"]["weights_path"])
            self.server.asked.append(("file", load_file(folder / "model.safetensors")))
            self.answer(200, {"results": [None]})
        elif self.path == "/reset_prefix_cache":
            self.answer(200, {"success": not self.server.busy})
        else:
            self.answer(200, None)
