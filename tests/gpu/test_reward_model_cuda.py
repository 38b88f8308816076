"""A reward model gives the same scores on a GPU. Skipped without one."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtrl.embedded.embedded_rows import MODEL_DIRECTORY
from mtrl.embedded.task import make_question
from mtrl.models.families import load_encoder
from mtrl.models.reward_model import load_reward_model
from mtrl.types import Rollouts
from mtrl.workers.micro_batches import MicroBatching
from mtrl.workers.reward_model_worker import RewardModelWorker
from pretraining.evaluation import make_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module")
def judge_path(tmp_path_factory):
    """The embedded model with a random head."""
    path = tmp_path_factory.mktemp("judge") / "rm"
    shutil.copytree(MODEL_DIRECTORY, path)
    weights = load_file(path / "model.safetensors")
    width = next(tensor.shape[1] for name, tensor in weights.items() if name.endswith("embed_tokens.weight"))
    weights["score.weight"] = torch.randn(1, width, generator=torch.Generator().manual_seed(0))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


def answered() -> Rollouts:
    prompts = make_prompts([make_question("test", index) for index in range(8)], load_encoder(MODEL_DIRECTORY))
    texts = [f"<think>{'it is often red ' * (i % 5)}</think><answer>{'ABC'[i % 3]}</answer>" for i in range(32)]
    mask = torch.ones(32, 4, dtype=torch.bool)
    empty = torch.zeros(32, 4)
    group = torch.arange(8).repeat_interleave(4)
    return Rollouts(
        tuple(prompts), group, empty.long(), mask, empty, tuple(texts), ("stop",) * 32, torch.zeros(32).long()
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-3), ("bf16", 0.25)])
def test_scores_equal_the_cpu(judge_path, dtype, tolerance):
    rollouts = answered()
    here = RewardModelWorker(load_reward_model(judge_path), MicroBatching(rows=8)).score(rollouts)
    there = RewardModelWorker(load_reward_model(judge_path, dtype=dtype, device="cuda"), MicroBatching(rows=32)).score(
        rollouts
    )
    torch.testing.assert_close(torch.tensor(there), torch.tensor(here), rtol=tolerance, atol=tolerance)
    assert torch.tensor(here).std() > 1, "scores differ enough to reveal a mistake"


def test_images_decide_on_the_gpu(judge_path):
    rollouts = answered()
    swapped = replace(rollouts, prompts=rollouts.prompts[::-1])
    model = RewardModelWorker(load_reward_model(judge_path, device="cuda"), MicroBatching(rows=32))
    assert not torch.allclose(torch.tensor(model.score(rollouts)), torch.tensor(model.score(swapped)), atol=1e-2)
