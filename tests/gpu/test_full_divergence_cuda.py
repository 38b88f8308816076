"""The divergence over the vocabulary as a loss, on a GPU: the CPU's gradient by every route. Skipped without one."""

import pytest
import torch

from mtrl.embedded.embedded_rows import MODEL_DIRECTORY
from mtrl.embedded.task import make_question
from mtrl.models.backbone import Backbone
from mtrl.models.families import load_encoder
from mtrl.models.forward import Forward
from mtrl.models.load_model import load_model
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Sampling
from mtrl.workers.reference import Reference
from pretraining.evaluation import make_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

ROUTES = {"packed": {"packed": True}, "shared": {}, "a row each": {"share_prefix": False}}


def gradient_on(device: str, rollouts, **route):
    """Gradients of the mean divergence from a reference with a slightly changed output matrix."""
    policy = Forward(Backbone(load_model(MODEL_DIRECTORY, device=device)), load_encoder(MODEL_DIRECTORY), **route)
    reference = Reference.frozen(policy)
    with torch.no_grad():
        reference.forward.backbone.output_matrix.mul_(0.4)
    theirs, ours = reference.response_hidden(rollouts), policy.response_hidden(rollouts)
    kl = reference.divergence(ours, theirs, policy, rollouts)
    kl.mean().backward()
    gradients = [p.grad.cpu() for p in policy.backbone.model.parameters() if p.grad is not None]
    assert not any(p.requires_grad for p in reference.forward.backbone.model.parameters())
    return kl.detach().cpu(), torch.cat([gradient.flatten() for gradient in gradients])


@pytest.fixture(scope="module")
def rollouts():
    backbone, encoder = Backbone(load_model(MODEL_DIRECTORY)), load_encoder(MODEL_DIRECTORY)
    prompts = make_prompts([make_question("test", index) for index in range(8)], encoder)
    return LocalGenerator(backbone, encoder).generate(prompts, Sampling(n=4, max_new_tokens=24))


@pytest.mark.parametrize("route", ROUTES)
def test_the_gradient_is_the_cpus(rollouts, route):
    kl, gradient = gradient_on("cuda", rollouts, **ROUTES[route])
    expected_kl, expected = gradient_on("cpu", rollouts)
    torch.testing.assert_close(kl, expected_kl, rtol=1e-3, atol=1e-4)
    assert expected_kl.mean() > 1e-3 and float((gradient - expected).norm() / expected.norm()) < 5e-3
