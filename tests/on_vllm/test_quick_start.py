"""The configuration of the quick start for eight GPUs (tests/data/quickstart.yaml), as it is but for sizes and paths,
on two CPU ranks with vLLM: LoRA, a critic, offloaded weights and optimizer, filters, an adaptive penalty, a checkpoint
to start from."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image
from run_helpers import REWARDS, read_metrics, read_tensors
from vllm_engines import INSTALLED

pytestmark = [
    pytest.mark.slow,  # two runs of vLLM on two ranks
    pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed"),
]

YAML = Path(__file__).parents[1] / "data/quickstart.yaml"
SECONDS = 900  # longer is a hang, even on a busy machine
STEPS = 3  # one of them before the checkpoint that the configuration starts from
SIZES = {
    "dataset.max_response_length": 16,
    "dataset.rollout_batch_size": 4,
    "dataset.val_batch_size": 4,
    "training.max_steps": STEPS,
    "training.n_gpus_per_node": 2,
    "training.save_freq": 1,
    "training.val_freq": 1,
    "worker.actor.global_batch_size": 4,
    "worker.actor.model.model_path": "zoo",
    "worker.rollout.max_new_tokens": 16,
}


def train(folder, **paths):
    settings = SIZES | {"training.output_dir": str(folder / "outputs")} | paths
    words = [f"{key}={value}" for key, value in settings.items()]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "PYTHONPATH": str(Path(__file__).parents[2])
    }  # fmt: skip
    command = [sys.executable, "-m", "mtrl", "train", "quickstart.yaml", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path):
    """The files that the configuration names."""
    shutil.copy(YAML, tmp_path / "quickstart.yaml")
    (tmp_path / "data/images").mkdir(parents=True)
    (tmp_path / "your_reward_function.py").write_text(REWARDS.partition("def accuracy")[0])
    rows = []
    for index in range(8):
        pixels = np.random.default_rng(index).integers(0, 256, (56, 56, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"data/images/{index}.png")
        rows.append(json.dumps({"prompt": f"<image>Which of {index}?", "images": [f"{index}.png"], "answer": "A"}))
    for name in ("train", "val"):
        (tmp_path / f"data/{name}.jsonl").write_text("\n".join(rows))
    return tmp_path


def test_the_quick_start_trains_on_two_ranks(folder):
    first = {"training.load_checkpoint_path": "null", "training.experiment_name": "first", "training.max_steps": 1}
    train(folder, **first)
    start = folder / "checkpoints/experiment/step_1000"
    start.parent.mkdir(parents=True)
    shutil.copytree(folder / "outputs/mtrl_training/first/checkpoints/step_1", start)
    said = train(folder)
    run = folder / "outputs/mtrl_training/qwen2_vl_7b"
    rows = [row for (_, validation), row in read_metrics(run).items() if not validation]
    assert len(rows) == STEPS - 1 and f"finished at step {STEPS}" in said
    for row in rows:
        assert row["critic/grad_norm"] > 0 and row["actor/grad_norm"] > 0
        assert 0 < row["actor/perception_token_fraction"] < 1 and 0 < row["actor/entropy_token_fraction"] < 1
        assert row["rollout/logprob_gap_mean"] < 0.1
    assert rows[0]["actor/kl_coef"] != rows[1]["actor/kl_coef"], "adaptive"
    before, last = (read_tensors(each) for each in (start, run / f"checkpoints/step_{STEPS}"))
    moved = [name for name, tensor in last.items() if name in before and not tensor.equal(before[name])]
    assert any(".lora_B." in name for name in moved) and any(name.startswith("critic/") for name in moved)

    check_nothing_is_taken_out(run / "config.yaml")


def check_nothing_is_taken_out(saved):
    """Every key of the file has its value in the run, but for sizes, and paths that are now absolute."""
    given, resolved = (dict(leaves(OmegaConf.to_container(OmegaConf.load(file)))) for file in (YAML, saved))
    assert len(given) > 70
    for key, value in given.items():
        if key not in SIZES:
            assert resolved[key] == value or str(resolved[key]).endswith(str(value)), key


def leaves(tree, prefix=""):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
