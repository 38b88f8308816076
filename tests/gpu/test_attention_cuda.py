"""Attention in two parts by the flash kernels, next to flex_attention and to float64. Skipped without a GPU."""

import pytest
import torch

from benchmarks.attention_kernels import Case, draw, exact, kernels
from benchmarks.delta_rule import relative_errors
from mtrl.embedded.embedded_rows import MODEL_DIRECTORY
from mtrl.embedded.task import make_question
from mtrl.models.backbone import Backbone
from mtrl.models.cascade_attention import CascadeMask
from mtrl.models.families import load_encoder
from mtrl.models.forward import Forward
from mtrl.models.load_model import load_model
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Needs, Sampling
from pretraining.evaluation import make_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CASES = {
    "shared": Case(prompts=2, responses=3, prompt=150, response=(1, 90), heads=4, key_heads=2, width=64),
    "one response": Case(prompts=3, responses=1, prompt=70, response=(5, 60), heads=4, key_heads=4, width=128),
    "wide heads": Case(prompts=1, responses=2, prompt=130, response=(30, 200), heads=4, key_heads=1, width=256),
}


@pytest.mark.parametrize("name", CASES)
def test_both_kernels_are_as_close_to_float64(name):
    inputs = draw(CASES[name])
    expected = exact(inputs)
    errors = {kernel: relative_errors(run(inputs), expected) for kernel, run in kernels().items()}
    for tensor, found in errors["cascade"].items():
        assert found < 0.02, errors
        assert found <= 2 * errors["flex_attention"][tensor], errors


@pytest.fixture(scope="module")
def rollouts():
    encoder = load_encoder(MODEL_DIRECTORY)
    engine = LocalGenerator(Backbone(load_model(MODEL_DIRECTORY, device="cuda")), encoder)
    prompts = make_prompts([make_question("test", index) for index in range(8)], encoder)
    return engine.generate(prompts, Sampling(n=4, max_new_tokens=24))


@pytest.mark.parametrize("share_prefix", [True, False])
def test_a_model_scores_and_learns_alike(share_prefix, rollouts, monkeypatch):
    """Log-probs, masses and gradients in bf16 differ from those of float32 as little as flex_attention's."""

    def run(dtype, flash):
        monkeypatch.setattr(Backbone, "has_flash_kernels", flash)
        backbone = Backbone(load_model(MODEL_DIRECTORY, device="cuda"), dtype)
        forward = Forward(backbone, load_encoder(MODEL_DIRECTORY), packed=True, share_prefix=share_prefix)
        signals = forward.signals(rollouts, Needs("old_logprobs", "attention_mass"))
        forward.logp(rollouts).sum().backward()
        gradients = torch.cat([p.grad.flatten().float() for p in backbone.model.parameters() if p.grad is not None])
        return signals.old_logprobs, signals.attention_mass, gradients

    exact_numbers = run(torch.float32, False)
    flex, flash = run(torch.bfloat16, False), run(torch.bfloat16, True)
    assert not torch.equal(flex[2], flash[2]), "another kernel ran"
    for expected, one, other in zip(exact_numbers, flex, flash, strict=True):
        gap, other_gap = ((each - expected).float().norm() / expected.float().norm() for each in (one, other))
        assert other_gap <= 1.5 * gap + 1e-4


def test_the_mask_is_handed_on(rollouts):
    backbone = Backbone(load_model(MODEL_DIRECTORY, dtype="bf16", device="cuda"))
    forward = Forward(backbone, load_encoder(MODEL_DIRECTORY), packed=True)
    layout = forward.prepare(rollouts).layout
    (mask,) = backbone.make_masks(layout.document_mask, packed=True).values()
    assert isinstance(mask, CascadeMask) and mask.to_prompts is not None
