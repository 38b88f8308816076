"""From the configuration to a critic: its weights, passes and schedule, and models that cannot be one."""

import shutil

import pytest
import torch
from helpers import same
from tiny_models import checkpoint, get_encoder, prompts_for, random_rollouts

from mtrl.compose import algorithm
from mtrl.compose.critic_worker import build_critic
from mtrl.compose.policy import build_policy, check_signals_available
from mtrl.config import ConfigError, find_warnings, load_config
from mtrl.models.families import encoder_files
from mtrl.models.state_dicts import exported_weights, save_model
from mtrl.models.value_head import HEAD
from mtrl.types import Needs

FAMILY = "qwen2_5_vl"
SIZES = {"dataset.rollout_batch_size": 8, "worker.actor.global_batch_size": 8}
GAE = SIZES | {"optimization.advantage_estimator": "gae", "optimization.disable_divergence": True}


def packaged_config(family=FAMILY, **overrides):
    given = {key.replace("__", "."): value for key, value in overrides.items()}
    path = {"worker.actor.model.model_path": str(checkpoint(family)), "dataset.min_pixels": 1}
    return load_config(None, GAE | path | {"worker.actor.fsdp.mixed_precision_dtype": "fp32"} | given)


def built(config, steps=10):
    encoder, policy = build_policy(config)
    return policy, build_critic(config, policy, encoder, steps)


# -------------------------------------------------------------------------------------------------------------- weights
def test_it_starts_from_the_actors_weights_with_a_head_of_zeros():
    policy, critic = built(packaged_config())
    ours, theirs = critic.model.state_dict(), policy.backbone.model.state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours.keys() - {"lm_head.weight"}:
        same(ours[name], theirs[name])
        assert ours[name].data_ptr() != theirs[name].data_ptr(), "it has its own weights"
    assert ours["lm_head.weight"].shape[0] == 1 and (ours["lm_head.weight"] == 0).all()
    rollouts = random_rollouts(prompts_for(FAMILY), [0, 1], [3, 2])
    assert (critic.probe(rollouts, Needs("values"), 0).values == 0).all()
    assert critic.learner.name == "critic" and "worker.critic.optim.lr" in critic.learner.advice


def test_a_reward_model_brings_its_head(tmp_path):
    _, critic = built(packaged_config())
    with torch.no_grad():
        critic.forward.backbone.output_matrix.fill_(0.25)
    save_model(critic.model, exported_weights(critic.model), tmp_path)
    for name, content in encoder_files(get_encoder(FAMILY), checkpoint(FAMILY)).items():
        (tmp_path / name).write_bytes(content)
    _, again = built(packaged_config(worker__critic__model__model_path=str(tmp_path)))
    assert (again.forward.backbone.output_matrix == 0.25).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("family", "its family is qwen3_vl, not qwen2_5_vl; use a model of the actor's family"),
        ("tokenizer", "its tokenizer differs"),
        ("images", "its image settings differ"),
    ],
)
def test_a_critic_that_cannot_read_the_actors_inputs_is_an_error(change, message, tmp_path):
    path = tmp_path / "critic"
    shutil.copytree(checkpoint("qwen3_vl" if change == "family" else FAMILY), path)
    if change == "tokenizer":
        file = path / "tokenizer.json"
        file.write_text(file.read_text().replace("<|quad_end|>", "<|other|>"))
        (path / "tokenizer_config.json").write_text(
            (path / "tokenizer_config.json").read_text().replace("<|quad_end|>", "<|other|>")
        )
    if change == "images":
        file = path / "preprocessor_config.json"
        file.write_text(file.read_text().replace('"image_mean": [', '"image_mean": [0.1, 0.2, 0.3], "was": ['))
    with pytest.raises(ConfigError, match=r"worker\.critic\.model\.model_path") as caught:
        built(packaged_config(worker__critic__model__model_path=str(path)))
    assert message in str(caught.value)


# --------------------------------------------------------------------------------------------------------------- passes
def test_it_reads_as_the_actor_does():
    config = packaged_config(worker__actor__tokens_per_micro_batch=77, worker__actor__share_prefix=False)
    policy, critic = built(config)
    assert critic.forward.share_prefix is policy.share_prefix is False and critic.forward.encoder is policy.encoder
    assert critic.learner.batching == algorithm.make_update_batching(config, False, False)
    assert critic.probe_batching.tokens == 77


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_vision_tower_is_frozen_in_the_critic_too(frozen):
    _, critic = built(packaged_config(worker__actor__model__freeze_vision_tower=frozen))
    assert any(p.requires_grad for p in critic.forward.backbone.vision_tower.parameters()) is not frozen
    assert critic.forward.backbone.output_matrix.requires_grad


def test_values_alone_need_no_pass_of_the_old_policy():
    assert algorithm.make_algorithm(packaged_config(), 1).needs == Needs("values")
    several = algorithm.make_algorithm(packaged_config(worker__actor__global_batch_size=4), 1).needs
    assert several == Needs("values", "old_logprobs", "entropy")


# ------------------------------------------------------------------------------------------------------------ schedules
def test_its_optimizer_and_schedule_are_its_own():
    names = {"lr": 3e-4, "weight_decay": 0.5, "betas": (0.5, 0.75), "warmup_ratio": 0.25, "min_lr_ratio": 0.125}
    keys = {f"worker__critic__optim__{name}": value for name, value in names.items()}
    config = packaged_config(
        **keys, worker__critic__optim__lr_scheduler_type="linear", worker__actor__max_grad_norm=2.0
    )
    ours = algorithm.make_schedule(config, config.worker.critic.optim, 10)
    assert (ours.lr, ours.weight_decay, ours.betas, ours.min_lr_ratio) == (3e-4, 0.5, (0.5, 0.75), 0.125)
    assert (ours.warmup_steps, ours.total_steps, ours.lr_scheduler_type, ours.max_grad_norm) == (2, 10, "linear", 2.0)
    theirs = algorithm.make_optimizer_settings(config, 10)
    assert (theirs.lr, theirs.warmup_steps, theirs.lr_scheduler_type) == (1e-6, 10, "constant_with_warmup")
    default = packaged_config()
    assert algorithm.make_schedule(default, default.worker.critic.optim, 10).lr == 1e-5


def test_the_actors_schedule_begins_after_the_warm_up():
    config = packaged_config(worker__critic__warmup_steps=4, worker__actor__global_batch_size=4)
    assert algorithm.make_optimizer_settings(config, 10).total_steps == 6 * 2
    assert algorithm.make_schedule(config, config.worker.critic.optim, 10).total_steps == 10 * 2
    assert algorithm.make_algorithm(config, 10).critic_warmup == 4
    assert algorithm.make_optimizer_settings(config, 3).total_steps == 0, "it never learns"
    grpo = load_config(None, SIZES | {"worker.critic.warmup_steps": 4})
    assert algorithm.make_algorithm(grpo, 10).critic_warmup == 0, "no critic, no warm-up"
    assert algorithm.make_optimizer_settings(grpo, 10).total_steps == 10


def test_the_clip_reaches_the_loss():
    assert algorithm.make_algorithm(packaged_config(worker__critic__cliprange_value=0.125), 1).value_loss.clip == 0.125


# ---------------------------------------------------------------------------------------------------- what hardly works
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"worker.critic.warmup_steps": 5, "training.max_steps": 5}, "only the critic is trained"),
        ({"worker.critic.optim.lr": 0.0}, "the critic is not trained"),
        ({"worker.critic.optim.lr": 0.5}, "worker.critic.optim.lr = 0.5: a step moves every weight"),
        ({"worker.actor.fsdp.param_dtype": "bf16"}, "= bf16 with worker.critic.optim.lr = 1e-05"),
    ],
)
def test_doubtful_settings_are_reported(overrides, message):
    assert any(message in line for line in find_warnings(load_config(None, GAE | overrides)))
    without = GAE | {"optimization.advantage_estimator": "grpo"}
    assert not any(message in line for line in find_warnings(load_config(None, without | overrides))), (
        "there is no critic"
    )


def test_a_warm_up_that_ends_is_not_warned_of():
    keys = {"worker.critic.warmup_steps": 4, "training.max_steps": 5}
    assert list(find_warnings(load_config(None, GAE | keys))) == []


def test_a_rule_may_read_values_if_there_is_a_critic(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\nfrom mtrl.algorithms.credit import Weight\nfrom mtrl.types import Needs\n"
        "@dataclass(frozen=True)\nclass Mine(Weight):\n    needs = Needs('values')\n"
        "    def apply(self, experience, key): return experience.signals.values\n"
    )
    config = packaged_config(optimization__credit=(f"{file}:Mine",))
    check_signals_available(config, algorithm.make_algorithm(config, 1), True)
    grpo = packaged_config(optimization__credit=(f"{file}:Mine",), optimization__advantage_estimator="grpo")
    with pytest.raises(ConfigError, match=r"Mine needs the signal values, and there is no critic"):
        check_signals_available(grpo, algorithm.make_algorithm(grpo, 1), True)


def test_the_name_of_the_head():
    assert HEAD == "score.weight", "as in checkpoints of others"
