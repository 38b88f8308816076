"""What a critic adds to the memory of a run, by formula and before the first step."""

from dataclasses import replace

import pytest
import torch
from test_memory import LIMITS, SIZE
from tiny_models import checkpoint, fresh_backbone, get_encoder

from mtrl.compose.memory_limits import make_plan
from mtrl.config import load_config
from mtrl.memory.estimate import count_held, estimate
from mtrl.memory.fake_model import FakeModel
from mtrl.memory.plan import Plan
from mtrl.memory.preflight import preflight
from mtrl.models.families import load_model_config
from mtrl.models.forward import Forward
from mtrl.models.model_size import critic_tensors
from mtrl.models.value_head import attach_head, load_value_model
from mtrl.rollout.local import LocalGenerator

FAMILY = "qwen2_5_vl"


def test_held_bytes_by_hand():
    found = count_held(SIZE, Plan(LIMITS), (500, 300, 8), (500, 8))
    assert found == {
        "weights": 4000, "weights of the critic": 4 * 808, "optimizer state": 2 * 2800,
        "optimizer state of the critic": 2 * 4 * 508,
    }  # fmt: skip


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_sizes_without_weights(family, tied):
    """Like the loaded critic: one output instead of the vocabulary, and the same input embedding."""
    config = load_model_config(str(checkpoint(family)))
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = tied
    tensors, learning = critic_tensors(FakeModel(config, Plan(LIMITS, train_vision=False)).model)
    critic = load_value_model(checkpoint(family))
    if (tower := getattr(critic.model, "visual", None)) is not None:
        tower.requires_grad_(False)
    assert sorted(tensors) == sorted(p.numel() for p in critic.parameters())
    assert sorted(learning) == sorted(p.numel() for p in critic.parameters() if p.requires_grad)


@pytest.mark.slow  # 3 s
def test_an_estimate_with_a_critic():
    config = load_model_config(str(checkpoint(FAMILY)))
    plain = estimate(config, Plan(LIMITS), ["update"])
    found = estimate(config, Plan(LIMITS, critic=config), ["update"])
    added = sum(p.numel() for p in load_value_model(checkpoint(FAMILY)).parameters())
    assert found.critic_parameters == added and plain.critic_parameters == 0
    assert found.held_bytes - plain.held_bytes == 3 * 4 * added
    assert found.phases == plain.phases, "they learn one after the other, and the actor also scores the vocabulary"
    wider = load_model_config(str(checkpoint(FAMILY)))
    wider.get_text_config().intermediate_size *= 8
    larger = estimate(config, Plan(LIMITS, critic=wider), ["update"])
    assert "gradients of the critic" in larger.phases["update"] and larger.peak_bytes > found.peak_bytes


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_the_plan_of_a_configuration(estimator):
    path = str(checkpoint(FAMILY))
    config = load_config(None, {"worker.actor.model.model_path": path, "optimization.advantage_estimator": estimator})
    plan = make_plan(config, on_gpu=False)
    assert (plan.critic is not None) is (estimator == "gae")
    if plan.critic is not None:
        assert plan.critic.model_type == FAMILY


def test_the_preflight_runs_the_critic_and_leaves_no_trace():
    encoder, limits = get_encoder(FAMILY), replace(LIMITS, prompts=2, prompts_per_update=2)
    forward, other = Forward(fresh_backbone(FAMILY), encoder), fresh_backbone(FAMILY)
    attach_head(other.model, torch.ones(1, other.output_matrix.shape[1]))
    critic = Forward(other, encoder)
    before = [p.detach().clone() for p in other.model.parameters()]
    kept = torch.ones_like(other.output_matrix)
    other.output_matrix.grad = kept
    generator = LocalGenerator(forward.backbone, encoder)
    without = preflight(forward, encoder, limits, generator, has_states=False)
    peaks = preflight(forward, encoder, limits, generator, has_states=False, critic=critic)
    assert peaks.keys() - without.keys() == {"critic"}
    gradients = sum(p.nbytes for p in other.model.parameters())
    assert peaks["critic"] > gradients, "they are made, and passes hold more"
    states = 2 * sum(p.nbytes for p in other.model.parameters())
    assert peaks["optimizer"] - without["optimizer"] == states
    assert other.output_matrix.grad is kept and not other.model.training
    assert all(p.grad is None for p in other.model.parameters() if p is not other.output_matrix)
    assert all(torch.equal(p, was) for p, was in zip(other.model.parameters(), before, strict=True))
