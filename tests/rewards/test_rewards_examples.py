"""Every file of examples/rewards, through the config and the sandbox."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from helpers import NAN, close
from reward_helpers import EXAMPLES, measured, rows, scored

TEXTS = ("<answer>red</answer>", "it is red", "<answer>blue</answer>", "it is blue", "<answer> Blue </answer>", "")
ANSWERS = ("red", "red", "red", "red", "blue", "blue")
EXPECTED = [1, 0.5, 0, 0, 1, 0]
STYLES = ["ten_lines.py", "trl_style.py:answer_reward", "easyr1_style.py", "verl_style.py"]


@pytest.mark.parametrize("style", STYLES)
def test_each_example_of_a_signature_gives_the_same_rewards(style):
    rewards = scored(EXAMPLES / style, rows(TEXTS, ANSWERS))
    close(rewards.total, EXPECTED)
    assert not rewards.failed.any()


def test_example_async_judge():
    """A real server on this machine, with fixed replies instead of a model."""

    class RewardModel(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = "I will not say" if "silence" in asked["messages"][0]["content"] else "Rating: 7"
            body = json.dumps({"choices": [{"message": {"content": reply}}]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), RewardModel)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    rewards = scored(EXAMPLES / "async_judge.py", rows(["a", "silence"], ["x"] * 2), reward_fn_kwargs={"url": url})
    server.shutdown()
    server.server_close()
    close(rewards.parts["async_judge"], [0.7, NAN])


def test_example_token_weights():
    rewards = scored(EXAMPLES / "token_weights.py", rows(["a red one", "blue"], ["red", "red"]))
    close(rewards.total, [1, 0])
    close(rewards.token_weights, [[1, 3, 1], [1, 1, 3]])  # 2 tokens and one of padding; 3 tokens


def test_example_look_at_image():
    red, blue = np.full((28, 56, 3), (220, 40, 40), np.uint8), np.full((28, 28, 3), (40, 80, 220), np.uint8)
    texts = ["a red thing", "a blue thing", "blue", "no image"]
    rollouts = rows(texts, ["x"] * 3, group=[0, 0, 1, 2], pictures=[red, blue, None])
    rewards = scored(EXAMPLES / "look_at_image.py", rollouts)
    close(rewards.parts["look_at_image"], [1, 0, 1, NAN])
    close(rewards.parts["share_of_main_colour"], [1, 1, 1, NAN])


def test_example_with_signals():
    rewards = scored(EXAMPLES / "with_signals.py", rows(["red", "blue"], ["red", "red"]), signals=measured())
    close(rewards.total, [1 + 0.2 / 1.5, 0])
    close(rewards.parts["mean_entropy"], [0.5, 2])


def test_every_example_is_run_above():
    source = Path(__file__).read_text()
    assert all(path.name in source for path in EXAMPLES.glob("*.py")) and len(list(EXAMPLES.glob("*.py"))) >= 8
