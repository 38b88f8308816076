"""The same numbers on a GPU. Skipped without one."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from mtrl.algorithms.rewards import VGR_ROUNDING
from mtrl.algorithms.signals import pool_sizes, segment, sequence_mass, vgr
from mtrl.embedded.embedded_rows import MODEL_DIRECTORY
from mtrl.embedded.task import make_question
from mtrl.models.backbone import Backbone
from mtrl.models.families import load_encoder
from mtrl.models.forward import Forward
from mtrl.models.load_model import DTYPES, load_model
from mtrl.models.perturb import Perturbation
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Needs, Sampling
from pretraining.evaluation import evaluate, make_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

QUESTIONS = [make_question("test", index) for index in range(40)]


def forward_on(device: str, compute: torch.dtype | None = None, compiled: bool = False, **route) -> Forward:
    encoder = load_encoder(MODEL_DIRECTORY)
    return Forward(Backbone(load_model(MODEL_DIRECTORY, device=device), compute, compiled=compiled), encoder, **route)


ROUTES = {
    "packed": {"packed": True},
    "packed, compiled": {"packed": True, "compiled": True},
    "packed, prompts not shared": {"packed": True, "share_prefix": False},
    "shared": {},
    "a row each": {"share_prefix": False},
}


def relative(found, expected):
    return float((found.cpu() - expected).norm() / expected.norm())


@pytest.fixture(autouse=True)
def nothing_compiled_yet():
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture(scope="module")
def rollouts():
    forward = forward_on("cpu")
    generator = LocalGenerator(forward.backbone, forward.encoder)
    return generator.generate(make_prompts(QUESTIONS[:12], forward.encoder), Sampling(n=4, max_new_tokens=24))


@pytest.mark.parametrize("route", ROUTES)
def test_signals_equal_the_cpu(rollouts, route):
    perturbation = Perturbation()
    views = [perturbation.view(prompt, step=0) for prompt in rollouts.prompts]
    needs = Needs("entropy", "entropy_change", "dependency", "attention_mass", "attention_maps")
    routes = forward_on("cpu"), forward_on("cuda", **ROUTES[route])
    here, there = (
        replace(each, perception_estimator="full_kl").signals(rollouts, needs, {"perturbed": views}) for each in routes
    )
    for name in (
        "old_logprobs",
        "perturbed_logprobs",
        "entropy",
        "entropy_change",
        "dependency",
        "attention_mass",
        "prompt_attention_mass",
    ):
        torch.testing.assert_close(getattr(here, name), getattr(there, name), rtol=2e-3, atol=2e-3)
    for row, (one, other) in enumerate(zip(here.attention_maps, there.attention_maps, strict=True)):
        torch.testing.assert_close(one.shares, other.shares, rtol=0, atol=5e-3)  # a level of a strong patch
        length = len(other.scale)
        torch.testing.assert_close(
            other.shares.sum(1), segment(there.attention_mass[row, :length], "all")[:, 1], rtol=0, atol=2e-3
        )


@pytest.mark.parametrize("route", ROUTES)
def test_gradients_equal_the_cpu(rollouts, route):
    gradients = []
    for forward in (forward_on("cpu"), forward_on("cuda", **ROUTES[route])):
        forward.logp(rollouts).sum().backward()
        gradients.append({name: p.grad for name, p in forward.backbone.model.named_parameters()})
    assert max(relative(gradients[1][name], expected) for name, expected in gradients[0].items()) < 2e-3


def test_no_graph_is_compiled_after_the_second_batch(rollouts):
    """Lengths differ from batch to batch; master weights in float32, products in bf16."""
    forward = forward_on("cuda", torch.bfloat16, packed=True, compiled=True)
    graphs = []
    for rows in (torch.arange(48), torch.arange(8, 40), torch.arange(4, 15), torch.arange(20, 48), torch.tensor([3])):
        part = rollouts.rows(rows)
        forward.signals(
            part, Needs("dependency", "attention_mass"), {"perturbed": [prompt.media for prompt in part.prompts]}
        )
        forward.logp(part).sum().backward()
        graphs.append(int(counters["stats"]["unique_graphs"]))
    assert graphs[0] > 0 and graphs[-1] == graphs[1], graphs


def test_a_pass_never_waits_for_the_device(rollouts):
    """While the device works on one piece, the next is made ready: a wait would leave it idle."""
    forward = forward_on("cuda", packed=True)
    forward.response_hidden(rollouts)
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward.response_hidden(rollouts)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bf16_compute_stays_close(rollouts):
    exact, narrow = forward_on("cuda").signals(rollouts), forward_on("cuda", torch.bfloat16).signals(rollouts)
    gap = (exact.old_logprobs - narrow.old_logprobs)[rollouts.mask].abs()
    assert gap.mean() < 2e-2


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("route", ROUTES)
def test_identical_responses_have_nearly_equal_attention(rollouts, route, dtype, capsys):
    """Rounding differences of a response that occurs eight times in a group are below the threshold of the vgr reward,
    although its copies are in different passes and positions."""
    options = dict(ROUTES[route])
    forward = forward_on("cuda", DTYPES[dtype], options.pop("compiled", False), **options)
    picked = rollouts.rows(torch.arange(0, 48, 4).repeat(8))  # one response per prompt, with its copies far apart
    late = []
    for rows in torch.arange(96).split([29, 5, 41, 21]):
        part = picked.rows(rows)
        mass = sequence_mass(forward.signals(part, Needs("attention_mass")).attention_mass, part.mask)
        late.append(vgr(segment(mass, "late"), pool_sizes(part.prompts)[part.group]))
    values = torch.cat(late).reshape(8, 12).double()
    spread = float(((values.amax(0) - values.amin(0)) / values.median(0).values).max())
    with capsys.disabled():
        print(f"\n{route}, {dtype}: identical responses differ by up to {spread:.1e} of their median")
    assert spread < VGR_ROUNDING[dtype]
    assert float(values.std(1).min()) > 0.01, "and prompts do differ"


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
        grades.append(evaluate(generator, forward.encoder, QUESTIONS, greedy))
    assert np.isclose(grades[0].avg, grades[1].avg, atol=0.05)


def test_the_embedded_model_learns_on_a_gpu(tmp_path):
    """The command line, fp32 master weights and bf16 compute: twelve steps are worth at least 0.15."""
    command = [sys.executable, "-m", "mtrl.cli", "demo", f"training.output_dir={tmp_path}", "training.max_steps=12"]
    command.append("worker.actor.fsdp.mixed_precision_dtype=bf16")
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "compiles kernels" in finished.stderr, "a first step that takes a minute must be announced"
    summary = json.loads(finished.stdout.splitlines()[-1])
    assert summary["accuracy_after"] - summary["accuracy_before"] >= 0.15, summary


@pytest.mark.parametrize("route", ROUTES)
def test_maps_equal_the_cpu(rollouts, route):
    """Attention on single image tokens, as `mtrl attention` draws it."""
    one, options = rollouts.rows(torch.tensor([0])), dict(ROUTES[route])
    on_gpu = forward_on("cuda", compiled=options.pop("compiled", False), **options)
    assert relative(on_gpu.maps(one, [3, 0]), forward_on("cpu").maps(one, [3, 0])) < 1e-3
