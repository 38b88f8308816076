"""Runs with tools: trained, replayed, and killed in the middle of a turn.

The embedded model was never taught to call tools, so an engine of the test writes its words; log-probs, gradients,
processes of environments, logs and checkpoints are the real ones.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from run_helpers import wait_for
from safetensors.torch import load_file

from mtrl.cli import main
from mtrl.embedded.task import make_question, row
from mtrl.tracking.jsonl import read_rows

CALLER = '''
from dataclasses import dataclass, replace
from typing import Any

import mtrl
from mtrl.rollout.responses import make_rollouts

CALL = '<tool_call>{"name": "look", "arguments": {"side": %d}}</tool_call>'


@dataclass
class Caller(mtrl.Engine):
    """Each response calls a tool, and answers in its second turn."""

    encoder: Any
    policy: Any
    version: int = 0

    def load(self, weights):
        self.version = weights.version

    def generate(self, prompts, sampling):
        numbers = [(prompt, sample) for prompt in prompts for sample in range(sampling.n)]
        texts = [self.answer(prompt.task.id, sample) for prompt, sample in numbers]
        tokens = [[*self.encoder.tokenizer.encode(text, add_special_tokens=False), self.encoder.stop_ids[0]]
                  for text in texts]
        group = [index for index in range(len(prompts)) for _ in range(sampling.n)]
        rollouts = make_rollouts(prompts, group, tokens, None, text=texts, finish=["stop"] * len(texts),
                                 version=self.version, pad_id=self.encoder.pad_id)
        return replace(rollouts, rollout_logprobs=self.policy.signals(rollouts).old_logprobs)

    def answer(self, id, sample):
        if "#" not in id:
            return CALL % (14 * (1 + sample))
        return f"<think>I look</think><answer>{'ABCD'[int(id.split('#')[1].split('.')[0]) % 4]}</answer>"
'''
TOOLS = '''
import random, time
from pathlib import Path

HERE = Path(__file__).parent

class Look:
    def reset(self, images, answer=None, **row):
        self.picture, self.answer, self.sides = images[0], answer, []

    def look(self, side: int) -> list:
        """Shows a corner.

        Args:
            side: Pixels.
        """
        self.sides.append(side)
        if (HERE / "stop_here").exists() and not (HERE / "stopped").exists():
            (HERE / "stopped").touch()
            time.sleep(60)
        corner = self.picture.crop((0, 0, side, side))
        return [{"type": "text", "text": f"{random.random():.6f}:"}, {"type": "image", "image": corner}]

    def get_reward(self):
        return sum(self.sides) / 1000

def widest(completions, environments, **columns):
    """The response of a group that looked at most gets 1."""
    most = max(sum(each.sides) for each in environments)
    return [float(sum(each.sides) == most) for each in environments]
'''
SMALL = (
    "training.max_steps=3", "training.save_freq=1", "training.save_limit=-1", "training.val_freq=-1",
    "training.logger=[]", "dataset.rollout_batch_size=2", "worker.actor.global_batch_size=2", "worker.rollout.n=3",
    "dataset.max_response_length=400", "dataset.max_prompt_length=2000", "worker.rollout.tool_barrier=true",
    "worker.rollout.environment_processes=1", "training.experiment_name=zoo", "dataset.min_pixels=3136",
    "dataset.max_pixels=3136", "worker.actor.fsdp.mixed_precision_dtype=fp32", "training.val_before_train=false",
)  # fmt: skip


@pytest.fixture
def words(tmp_path):
    (tmp_path / "caller.py").write_text(CALLER)
    (tmp_path / "tools.py").write_text(TOOLS)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for index in range(6):
            question = row(make_question("train", index))
            (picture,) = question.pop("images")
            picture.save(tmp_path / f"{index}.png")
            file.write(json.dumps(question | {"images": [f"{index}.png"]}) + "\n")
    data = tmp_path / "rows.jsonl"
    return [
        *SMALL, "worker.actor.model.model_path=zoo", f"dataset.train_files={data}", f"dataset.val_files={data}",
        f"worker.rollout.name={tmp_path}/caller.py:Caller", f"worker.rollout.environment={tmp_path}/tools.py:Look",
        f"worker.reward.functions=[accuracy,{tmp_path}/tools.py:widest]", "worker.reward.weights=[1.0,0.5]",
        f"training.output_dir={tmp_path}",
    ]  # fmt: skip


def find_run(words, name="zoo"):
    return Path(next(word for word in words if word.startswith("training.output_dir="))[20:]) / "mtrl" / name


def weights(run, step):
    return load_file(run / f"checkpoints/step_{step}/model.safetensors")


def test_a_run_with_tools_trains_and_is_replayed(words, capsys):
    assert main(["train", *words]) == 0
    run = find_run(words)
    rows = [each for each in read_rows(run / "metrics.jsonl") if "tools/calls" in each]
    assert [each["tools/calls"] for each in rows] == [1, 1, 1] and [each["tools/turns"] for each in rows] == [2, 2, 2]
    assert all(each["tools/failure_frequency"] == 0 and each["tools/images"] == 1 for each in rows)
    assert rows[0]["reward/Look"] == pytest.approx((14 + 28 + 42) / 3 / 1000, abs=1e-6)
    assert rows[0]["reward/widest"] == pytest.approx(1 / 3), "the last sample of a group looks at most"
    assert rows[0]["rollout/logprob_gap_max"] < 1e-4 and rows[0]["actor/grad_norm"] > 0
    first, last = weights(run, 1), weights(run, 3)
    assert any(not torch.equal(first[name], last[name]) for name in first)

    recorded = read_rows(run / "rollouts.jsonl")
    task = next(each["id"] for each in recorded if each["step"] == 2)
    assert [each["role"] for each in recorded[0]["response_turns"]] == ["assistant", "tool", "assistant"]
    capsys.readouterr()
    assert main(["replay", str(run), "2", task]) == 0
    out = capsys.readouterr().out
    assert out.count("tools (look), same") == 3 and out.count("again: same") == 3
    assert json.loads(out.splitlines()[-1])["messages_that_differ"] == 0
    tools = run.parent.parent / "tools.py"
    tools.write_text(TOOLS.replace("(0, 0, side, side)", "(1, 1, side, side)"))
    assert main(["replay", str(run), "2", task.rpartition(":")[2], "--sample", "1"]) == 1
    out = capsys.readouterr().out
    assert "DIFFERS" in out and "(other pixels)" in out
    assert main(["replay", str(run), "9", task]) == 2 and "has no step 9" in capsys.readouterr().err


def test_a_run_killed_in_a_turn_resumes_exactly(words):
    folder = find_run(words).parent.parent
    assert main(["train", *words, "training.experiment_name=whole"]) == 0
    killed = [*words, "training.experiment_name=killed"]
    command = [sys.executable, "-m", "mtrl", "train", *killed]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    run = find_run(words, "killed")
    try:
        wait_for((run / "checkpoints/step_1").is_dir, "the first checkpoint")
        (folder / "stop_here").touch()
        wait_for(lambda: (folder / "stopped").exists() or process.poll() is not None, "a tool that waits")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert (folder / "stopped").exists() and not (run / "checkpoints/step_3").exists(), "killed while a tool ran"
    assert main(["train", *killed]) == 0
    expected, found = weights(find_run(words, "whole"), 3), weights(run, 3)
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)
