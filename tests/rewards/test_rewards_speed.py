"""What the sandbox costs: time over the function's own, and how often an image travels."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import close
from PIL import Image
from reward_helpers import rows

from mtrl.compose.reward_scorer import build_scorer
from mtrl.config import load_config
from mtrl.rewards import sandbox as sandboxes
from mtrl.rewards.sandbox import Sandbox
from mtrl.sandbox.worker_process import WorkerProcess


def test_many_calls_travel_in_few_messages(tmp_path, monkeypatch):
    """4,096 calls in 4 workers: a message has up to 128 of them, and fewer towards the end."""
    path, sent, send = tmp_path / "quick.py", [], WorkerProcess.send
    path.write_text("def reward_function(data): return 1.0\n")
    samples = [{"response": "x" * 500, "response_token_ids": list(range(200)), "row": i} for i in range(4096)]
    sandbox = Sandbox(str(path), {}, workers=4, timeout_s=30)
    try:
        for future in sandbox.submit(samples[:64]):  # every worker has started
            future.result()
        monkeypatch.setattr(WorkerProcess, "send", lambda self, *rest: sent.append(rest) or send(self, *rest))
        assert [future.result().value for future in sandbox.submit(samples)] == [1.0] * len(samples)
    finally:
        sandbox.close()
    assert len(sent) < 100


def test_scoring_does_not_block_the_caller(tmp_path):
    """The probes run at the same time."""
    path, gate = tmp_path / "slow.py", tmp_path / "gate"
    path.write_text(
        "import os, time\ndef reward_function(data):\n"
        f"    while not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
        "    return 1.0\n"
    )
    config = load_config(None, {"worker.reward.functions": (str(path),), "worker.reward.num_cpus": 1})
    scorer = build_scorer(config, 10)
    pending = scorer.submit(rows(["a", "b"], ["x"] * 2), 0)
    gate.touch()  # no call has ended before
    close(pending.result().total, [1, 1])
    scorer.close()


# ------------------------------------------------------------------------------------------------------------- images
def comes_true(condition, seconds=10.0):
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.02)
    return condition()


LOOKS = """
import os
def mean(data):
    if data["response"] == "quit": os._exit(3)
    image = data["images"][0]
    return sum(image.getpixel((1, 2))) / 3, {"width": image.width, "mode": len(image.mode)}
def many(completions, images, **kwargs):
    return [float(each[0].getpixel((0, 0))[0]) for each in images]
"""


def test_an_image_is_written_once_per_step_and_never_pickled(tmp_path, monkeypatch):
    """Two functions, two workers each, eight responses to each of three prompts, and a worker that dies in between."""
    written, pickled = [], []
    save, state = Image.Image.save, Image.Image.__getstate__
    monkeypatch.setattr(
        Image.Image, "save", lambda self, *a, **k: written.append(self.getpixel((0, 0))) or save(self, *a, **k)
    )
    monkeypatch.setattr(Image.Image, "__getstate__", lambda self: pickled.append(1) or state(self))
    path = tmp_path / "looks.py"
    path.write_text(LOOKS)
    functions = (f"{path}:mean", f"{path}:many")
    scorer = build_scorer(load_config(None, {"worker.reward.functions": functions, "worker.reward.num_cpus": 2}), 10)
    pictures = [np.full((28, 56, 3), 10 * (i + 1), np.uint8) for i in range(3)]
    texts = ["fine"] * 11 + ["quit"] + ["fine"] * 12
    rollouts = rows(texts, ["x"] * 3, group=[g for g in range(3) for _ in range(8)], pictures=pictures)
    for step in range(2):
        rewards = scorer.submit(rollouts, step).result()
        expected = [10.0] * 8 + [20.0] * 8 + [30.0] * 8
        close(rewards.parts["many"], expected)
        close(rewards.parts["mean"], [0.0 if text == "quit" else x for x, text in zip(expected, texts, strict=True)])
        close(rewards.parts["width"][:2], [56, 56])
        assert sorted(written) == [(x, x, x) for x in (10, 20, 30)] and not pickled
        written.clear()
        assert comes_true(lambda: not list(Path(sandboxes.IMAGES.directory.name).iterdir()))  # they go with the step
    scorer.close()


def test_images_of_other_kinds_travel_too(tmp_path):
    path = tmp_path / "kinds.py"
    path.write_text(
        "def f(data): return float(data['column'].mode == data['mode'] and data['column'].size == (3, 2))\n"
    )
    sandbox = Sandbox(f"{path}:f", {}, workers=1, timeout_s=20)
    modes = ("1", "L", "P", "RGB", "RGBA", "LA", "I;16")
    samples = [{"response": "", "mode": mode, "column": Image.new(mode, (3, 2))} for mode in modes]
    assert [future.result(timeout=60).value for future in sandbox.submit(samples)] == [1.0] * len(modes)
    sandbox.close()


@pytest.mark.slow  # 2 s
def test_a_killed_run_leaves_no_images(tmp_path):
    path = tmp_path / "slow.py"
    path.write_text("import time\ndef f(data): time.sleep(1000)\n")
    program = (
        "import json, time\nfrom PIL import Image\nfrom mtrl.rewards import sandbox\n"
        f"running = sandbox.Sandbox({str(path) + ':f'!r}, {{}}, workers=1, timeout_s=1000)\n"
        "image = Image.new('RGB', (9, 9))\n"
        "asked = running.submit([{'response': '', 'images': [image]}])\n"
        "while not sandbox.IMAGES._paths: time.sleep(0.01)\n"
        "print(json.dumps(sandbox.IMAGES.directory.name), flush=True)\n"
        "asked[0].result()\n"
    )
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    directory = Path(json.loads(run.stdout.readline()))
    assert len(list(directory.iterdir())) == 1
    run.kill()
    run.wait()
    run.stdout.close()
    assert comes_true(lambda: not directory.exists())
