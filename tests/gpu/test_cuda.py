"""The same numbers on a GPU. Skipped without one."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from mtrl.models.backbone import Backbone
from mtrl.models.families import load_encoder
from mtrl.models.forward import Forward
from mtrl.models.load import load_model
from mtrl.models.perturb import Perturbation
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Sampling
from mtrl.zoo.exam import examine, prompts_of
from mtrl.zoo.rows import MODEL_DIRECTORY
from mtrl.zoo.task import make_question

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

QUESTIONS = [make_question("test", index) for index in range(40)]


def forward_on(device: str, compute: torch.dtype | None = None, share_prefix: bool = True) -> Forward:
    encoder = load_encoder(MODEL_DIRECTORY)
    return Forward(Backbone(load_model(MODEL_DIRECTORY, device=device), compute), encoder, share_prefix=share_prefix)


@pytest.fixture(scope="module")
def rollouts():
    forward = forward_on("cpu")
    generator = LocalGenerator(forward.backbone, forward.encoder)
    return generator.generate(prompts_of(QUESTIONS[:12], forward.encoder), Sampling(n=4, max_new_tokens=24))


@pytest.mark.parametrize("share_prefix", [True, False])
def test_signals_equal_the_cpu(rollouts, share_prefix):
    perturbation = Perturbation()
    views = [perturbation.view(prompt, step=0) for prompt in rollouts.prompts]
    here, there = (
        forward_on(device, share_prefix=share_prefix).signals(rollouts, views, entropy=True, dependency="full_kl")
        for device in ("cpu", "cuda")
    )
    for name in ("old", "perturbed", "entropy", "dependency"):
        torch.testing.assert_close(getattr(here, name), getattr(there, name), rtol=2e-3, atol=2e-3)


def test_bf16_compute_stays_close(rollouts):
    exact, narrow = forward_on("cuda").signals(rollouts), forward_on("cuda", torch.bfloat16).signals(rollouts)
    gap = (exact.old - narrow.old)[rollouts.mask].abs()
    assert gap.mean() < 2e-2


def test_gradients_reach_every_parameter_in_bf16(rollouts):
    forward = forward_on("cuda", torch.bfloat16)
    forward.logp(rollouts).sum().backward()
    missing = [name for name, p in forward.backbone.model.named_parameters() if p.grad is None]
    assert not missing
    assert all(torch.isfinite(p.grad).all() for p in forward.backbone.model.parameters())


def test_generation_grades_equal_the_cpu():
    greedy = Sampling(temperature=0, max_new_tokens=24)
    grades = []
    for device in ("cpu", "cuda"):
        forward = forward_on(device)
        generator = LocalGenerator(forward.backbone, forward.encoder)
        grades.append(examine(generator, forward.encoder, QUESTIONS, greedy))
    assert np.isclose(grades[0].avg, grades[1].avg, atol=0.05)


def test_the_embedded_model_learns_on_a_gpu(tmp_path):
    """The command line, fp32 master weights and bf16 compute: twelve steps are worth at least 0.15."""
    command = [sys.executable, "-m", "mtrl.cli", "demo", f"training.output_dir={tmp_path}", "training.max_steps=12"]
    command.append("worker.actor.fsdp.mixed_precision_dtype=bf16")
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-3000:]
    summary = json.loads(finished.stdout.splitlines()[-1])
    assert summary["accuracy_after"] - summary["accuracy_before"] >= 0.15, summary
