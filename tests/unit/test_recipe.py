"""From the configuration to the values of a run: every key that is a number, a switch or a name."""

from dataclasses import replace

import pytest
from loop_helpers import spec

from mtrl.algorithms.batches import BatchPlan
from mtrl.algorithms.credit.attention_weights import AttentionWeights
from mtrl.algorithms.credit.entropy_filter import EntropyFilter
from mtrl.algorithms.credit.perception_filter import PerceptionFilter
from mtrl.algorithms.credit.trajectory_scaling import TrajectoryScaling
from mtrl.algorithms.divergence import Divergence
from mtrl.algorithms.filtering import GroupFilter
from mtrl.algorithms.losses import Cispo, Loss, Ppo, Sapo
from mtrl.algorithms.replay import ReplayRule
from mtrl.compose.algorithm import (
    add_logprob_needs,
    attention_interval,
    count_steps,
    dropout_seed,
    make_algorithm,
    make_credit_rules,
    make_divergence,
    make_optimizer_settings,
    make_perturbation,
    make_policy_loss,
    make_probe_batching,
    make_reward_schedule,
    make_training_sampling,
    make_update_batching,
    make_validation_sampling,
    offloads_optimizer,
)
from mtrl.config import ConfigError, load_config
from mtrl.models.perturb import Perturbation
from mtrl.training.algorithm_spec import AlgorithmSpec, due
from mtrl.training.dynamic_sampling import Filtering
from mtrl.types import Needs, Sampling
from mtrl.workers.learner import OptimizerSettings
from mtrl.workers.micro_batches import MicroBatching


def optimization(**values):
    return load_config(None, {f"optimization.{name}": value for name, value in values.items()})


# ------------------------------------------------------------------------------------------------------- steps of a run
@pytest.mark.parametrize(
    ("overrides", "rows", "steps"),
    [
        ({"training.total_epochs": 3, "dataset.rollout_batch_size": 4}, 10, 7),  # 30 prompts, 4 per step
        ({"training.total_epochs": 1, "dataset.rollout_batch_size": 4}, 3, 1),
        ({"training.max_steps": 5}, 10, 5),
    ],
)
def test_total_steps(overrides, rows, steps):
    overrides = {"worker.actor.global_batch_size": 1} | overrides
    assert count_steps(load_config(None, overrides), rows) == steps


SIZES = {"dataset.rollout_batch_size": 8, "worker.actor.global_batch_size": 2, "worker.actor.ppo_epochs": 3}


def test_optimizer_steps_of_a_run():
    warmup = {"worker.actor.optim.warmup_ratio": 0.1, "worker.actor.optim.warmup_steps": 99}
    config = load_config(None, SIZES | warmup)
    found = make_optimizer_settings(config, steps=10)
    assert found.total_steps == 10 * 4 * 3 and found.warmup_steps == 12
    assert (
        make_optimizer_settings(load_config(None, {**warmup, "worker.actor.optim.warmup_ratio": None}), 1).warmup_steps
        == 99
    )
    rules = make_algorithm(config, 10)
    assert (rules.prompts_per_step, rules.batches.global_batch_size, rules.batches.ppo_epochs) == (8, 2, 3)


def test_the_optimizer_has_the_keys_of_the_configuration():
    values = {
        "lr": 2e-6, "weight_decay": 0.1, "betas": [0.8, 0.9], "warmup_steps": 4, "lr_scheduler_type": "cosine",
        "min_lr_ratio": 0.2,
    }  # fmt: skip
    overrides = {f"worker.actor.optim.{name}": value for name, value in values.items()}
    config = load_config(None, {**overrides, **SIZES, "worker.actor.max_grad_norm": 0.7})
    assert make_optimizer_settings(config, 5) == OptimizerSettings(2e-6, 0.1, (0.8, 0.9), 4, 60, "cosine", 0.2, 0.7)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_which_optimizer_is_used(name):
    assert make_optimizer_settings(load_config(None, {"worker.actor.optim.name": name}), 1).name == name


@pytest.mark.parametrize(
    ("kind", "dropout", "seed"), [(None, 0.5, None), ("lora", 0.0, None), ("lora", 0.5, 7), ("qlora", 0.5, 7)]
)
def test_only_adapters_that_drop_something_draw_random_numbers(kind, dropout, seed):
    model = {"worker.actor.model.peft_type": kind, "worker.actor.model.lora_dropout": dropout}
    assert dropout_seed(load_config(None, model | {"dataset.seed": 7})) == seed


def test_the_defaults_of_an_optimizer_match_the_configuration():
    assert replace(make_optimizer_settings(load_config(None), 1), total_steps=1) == OptimizerSettings()


# ------------------------------------------------------------------------------------------------------------- sampling
def test_sampling_has_the_keys_of_the_configuration():
    values = {
        "n": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 9, "max_new_tokens": 11,
        "val.n": 2, "val.temperature": 0.3,
    }  # fmt: skip
    config = load_config(None, {f"worker.rollout.{name}": value for name, value in values.items()})
    assert make_training_sampling(config) == Sampling(
        n=3, temperature=0.7, top_p=0.9, top_k=40, max_new_tokens=11, seed=9
    )
    assert make_validation_sampling(config) == Sampling(n=2, temperature=0.3, max_new_tokens=11, seed=9)


def test_dr_grpo_divides_by_the_length_of_the_config():
    config = load_config(None, {"worker.rollout.max_new_tokens": 4, "dataset.max_response_length": 8})
    rules = make_algorithm(config, 1)
    assert rules.sampling.max_new_tokens == 4 and rules.batches.max_response_length == 8


# ----------------------------------------------------------------------------------------------------------- the recipe
def test_the_recipe_has_the_keys_of_the_configuration():
    values = {
        "dataset.rollout_batch_size": 8, "worker.actor.global_batch_size": 4, "worker.actor.ppo_epochs": 2,
        "dataset.max_response_length": 9, "dataset.seed": 5, "training.val_freq": 6, "training.save_freq": 7,
        "optimization.loss_type": "dr_grpo", "optimization.loss_token_denominator": "selected",
        "optimization.mask_truncated_responses": True, "optimization.tis_clip": 3.0,
        "optimization.tis_level": "sequence", "optimization.scale_rewards": "batch",
    }  # fmt: skip
    rules = make_algorithm(load_config(None, values), 12)
    assert (rules.total_steps, rules.prompts_per_step, rules.seed) == (12, 8, 5)
    assert (rules.val_freq, rules.save_freq) == (6, 7)
    assert rules.batches == BatchPlan(4, 2, "dr_grpo", "selected", 9, True)
    assert rules.loss == Loss(make_policy_loss(load_config(None)), tis_clip=3.0, tis_level="sequence")
    assert rules.estimator.scale_rewards == "batch"


@pytest.mark.parametrize(("on", "coef"), [(True, 0.3), (False, 0.0)])
def test_the_entropy_penalty_has_a_switch(on, coef):
    config = optimization(use_entropy_penalty=on, entropy_penalty_coef=0.3)
    assert make_algorithm(config, 1).loss.entropy_penalty_coef == coef


@pytest.mark.parametrize(
    ("before", "first", "validates"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_only_a_run_without_steps_is_validated_first(before, first, validates):
    config = load_config(None, {"training.val_before_train": before})
    assert make_algorithm(config, 1, is_new_run=first).validate_first is validates
    if first:
        assert make_algorithm(config, 1).validate_first is validates


def test_needs_of_rules_rewards_trackers_and_divergence_are_combined():
    rules = make_algorithm(optimization(enable_perception_filtering=True), 1)
    assert {"dependency", "ref_logprobs", "old_logprobs", "entropy"} <= rules.needs.names
    config = optimization(disable_divergence=True)
    assert not make_algorithm(config, 1).needs
    assert make_algorithm(optimization(disable_divergence=True, replay_buffer_size=8), 1).needs == Needs(
        "old_logprobs", "entropy"
    )
    found = make_algorithm(config, 1, rewards=[Needs("attention_mass")], trackers=Needs("prompt_attention_mass"))
    assert found.needs == Needs("attention_mass", "prompt_attention_mass"), (
        "attention needs no pass over the vocabulary"
    )


def test_a_cut_is_compared_on_its_support():
    words = {"optimization.replay_buffer_size": 8, "optimization.disable_divergence": True}
    for cut in ({"worker.rollout.top_p": 0.9}, {"worker.rollout.top_k": 20}):
        assert make_algorithm(load_config(None, words | cut), 1).needs == Needs("old_logprobs", "entropy", "support")


@pytest.mark.parametrize("alone", ["attention_mass", "prompt_attention_mass"])
def test_attention_alone_needs_no_scores(alone):
    assert add_logprob_needs(Needs(alone), load_config(None, SIZES | {"worker.actor.ppo_epochs": 1})) == Needs(
        alone, "old_logprobs", "entropy"
    )
    assert add_logprob_needs(Needs(alone), load_config(None)) == Needs(alone)
    assert "old_logprobs" in add_logprob_needs(
        Needs(alone), load_config(None, {"worker.rollout.off_policy_steps": 1})
    ), "the ratio to it corrects"


# ------------------------------------------------------------------------------------------------------------ attention
@pytest.mark.parametrize(
    ("asked", "needed", "every"),
    [("auto", False, 10), ("auto", True, 1), (True, False, 1), (True, True, 1), (False, True, 0)],
)
def test_how_often_attention_is_read(asked, needed, every):
    assert attention_interval(optimization(compute_attention_metrics=asked), needed) == every


def test_attention_is_read_now_and_then_unless_somebody_reads_signals():
    config = load_config(None)
    assert attention_interval(config) == make_algorithm(config, 1).attention_every == 10
    assert make_algorithm(config, 1, rewards=[Needs("old_logprobs"), Needs()]).attention_every == 1, (
        "one of them reads attention"
    )
    assert make_algorithm(config, 1, rewards=[Needs()]).attention_every == 10
    assert make_algorithm(config, 1, trackers=Needs("attention_mass")).attention_every == 1
    assert make_algorithm(config, 1, can_read_attention=False).attention_every == 0


# --------------------------------------------------------------------------------------------------------------- credit
KEYS = {
    "top_p_perception_tokens": 0.3, "top_p_entropy_tokens": 0.4, "trajectory_scaling_min": 0.5,
    "trajectory_scaling_max": 3.0, "token_weight_target": "mask", "token_weight_clip": [0.1, 4.0],
    "token_weight_smooth_sigma": 1.5, "token_weight_top_ratio": 0.6,
}  # fmt: skip
SWITCHES = {
    "enable_perception_filtering": PerceptionFilter(0.3),
    "enable_entropy_filtering": EntropyFilter(0.4),
    "enable_trajectory_reweighting": TrajectoryScaling(0.5, 3.0),
    "enable_token_weights": AttentionWeights("mask", (0.1, 4.0), 1.5, 0.6, "auto"),
}


def test_no_switch_no_rule():
    assert make_credit_rules(optimization(**KEYS)) == ()


@pytest.mark.parametrize("switch", SWITCHES)
def test_each_switch_adds_its_rule(switch):
    assert make_credit_rules(optimization(**KEYS, **{switch: True})) == (SWITCHES[switch],)


def test_an_entry_has_its_own_arguments_whatever_the_keys_of_the_switches_are():
    config = optimization(**KEYS, credit=["perception_filter", {"name": "perception_filter", "top_p": 0.1}])
    assert make_credit_rules(config) == (PerceptionFilter(), PerceptionFilter(0.1))


def test_all_switches_in_the_order_of_the_contract():
    assert make_credit_rules(optimization(**KEYS, **dict.fromkeys(SWITCHES, True))) == tuple(SWITCHES.values())


@pytest.mark.parametrize(("asked", "reads"), [("auto", True), (True, True), (False, False)])
def test_token_weights_read_attention_unless_it_is_off(asked, reads):
    assert ("attention_mass" in AttentionWeights(compute_attention_metrics=asked).needs) is reads


def test_the_arguments_of_a_further_rule_are_checked():
    (rule,) = make_credit_rules(optimization(credit=[{"name": "entropy_change", "strength": 0.5}]))
    assert rule.strength == 0.5
    with pytest.raises(ConfigError, match=r"optimization\.credit: entropy_change: strength: "):
        make_credit_rules(optimization(credit=[{"name": "entropy_change", "strength": "much"}]))


# -------------------------------------------------------------------------------------------------- divergence and loss
def test_the_divergence_has_the_keys_of_the_configuration():
    values = {
        "divergence_penalty": "full", "divergence_coef": 0.5, "use_divergence_loss": True, "divergence_target": 3.0,
        "divergence_horizon": 50.0,
    }  # fmt: skip
    for kind in ("fixed", "adaptive"):
        expected = Divergence(
            "full", 0.5, use_divergence_loss=True, divergence_type=kind, divergence_target=3.0, divergence_horizon=50.0
        )
        assert make_divergence(optimization(**values, divergence_type=kind)) == expected


def test_when_the_reference_is_synced():
    assert make_algorithm(optimization(), 1).sync_ref_every == spec().sync_ref_every == 0, "never"
    assert make_algorithm(load_config(None, {"worker.ref.sync_every": 5}), 1).sync_ref_every == 5


@pytest.mark.parametrize(("state", "weights", "comes"), [(0, 0, 0), (1, 0, 1), (0, 1, 0), (1, 1, 0)])
def test_whether_optimizer_state_is_offloaded_between_steps(state, weights, comes):
    keys = {"offload.offload_optimizer": bool(state), "fsdp.cpu_offload": bool(weights)}
    config = load_config(None, {f"worker.actor.{name}": value for name, value in keys.items()})
    assert offloads_optimizer(config) == bool(comes)


def test_maps_of_the_responses_that_are_recorded():
    record = {"training.record_rollouts_per_step": 7}
    assert make_algorithm(load_config(None, record), 1).maps_per_step == spec().maps_per_step == 0, "they cost a pass"
    assert make_algorithm(load_config(None, record | {"training.record_attention_maps": True}), 1).maps_per_step == 7


def test_rules_are_bound_to_the_tokenizer():
    config = optimization(credit=["oracle"])
    (bound,), (unbound,) = make_algorithm(config, 1, decode=str).credit, make_algorithm(config, 1).credit
    assert bound.decode is str and unbound.decode is None


@pytest.mark.parametrize(
    ("divergence", "needs", "reads"),
    [
        (None, Needs("old_logprobs"), False),
        (None, Needs("ref_logprobs"), True),  # a credit rule or a reward
        (None, Needs("divergence"), True),
        (Divergence("full", 0.1, use_divergence_loss=True), Needs(), True),  # the update alone
    ],
)
def test_who_reads_the_reference(divergence, needs, reads):
    assert spec(divergence=divergence, needs=needs).reads_reference is reads


@pytest.mark.parametrize(
    ("values", "there"),
    [
        ({}, True),
        ({"disable_divergence": True}, False),
        ({"divergence_coef": 0.0}, False),
        ({"divergence_coef": 1.0}, True),
    ],
)
def test_a_divergence_with_coefficient_zero_is_none(values, there):
    assert (make_divergence(optimization(**values)) is not None) is there


@pytest.mark.parametrize(
    ("name", "level", "found"),
    [
        ("ppo", "token", (Ppo, "token")),
        ("ppo", "sequence", (Ppo, "sequence")),
        ("gspo", "token", (Ppo, "sequence")),
        ("cispo", "token", (Cispo, "token")),
        ("sapo", "token", (Sapo, "token")),
    ],
)
def test_gspo_is_ppo_by_response(name, level, found):
    loss = make_policy_loss(optimization(policy_loss=name, importance_sampling_level=level))
    kind, expected = found
    assert isinstance(loss, kind) and loss.level == expected


# -------------------------------------------------------------------------------------------------------- micro-batches
def batching(**actor):
    return load_config(None, {f"worker.actor.{name}": value for name, value in actor.items()})


@pytest.mark.parametrize("share", [True, False])
def test_passes_are_cut_by_tokens_or_by_rows(share):
    by_tokens = batching(tokens_per_micro_batch=777)
    assert make_update_batching(by_tokens, True, share) == MicroBatching(777, at_least=32768, share_prefix=share)
    assert make_update_batching(by_tokens, False, share) == MicroBatching(777, at_least=0, share_prefix=share)
    assert make_probe_batching(by_tokens, True, share) == MicroBatching(777, at_least=65536, share_prefix=share)
    assert make_probe_batching(by_tokens, False, share) == MicroBatching(777, at_least=0, share_prefix=share)
    sizes = {"micro_batch_size_per_device_for_update": 3, "micro_batch_size_per_device_for_experience": 5}
    by_rows = batching(dynamic_batching=False, **sizes)
    assert make_update_batching(by_rows, True, share) == MicroBatching(rows=3, share_prefix=share)
    assert make_probe_batching(by_rows, True, share) == MicroBatching(rows=5, share_prefix=share)


@pytest.mark.parametrize(("given", "found"), [("auto", 16), (8, 8)])
def test_the_patches_of_a_perturbation(given, found):
    expected = Perturbation(
        perturbation="random_patch_blackening",
        patch_size=found,
        black_prob=0.5,
        noise_std=189.0,
        blur_radius=6.0,
        seed=1,
    )
    assert make_perturbation(load_config(None, {"optimization.patch_size": given, "dataset.seed": 1}), 16) == expected


# ------------------------------------------------------------------------------------------------------- reward weights
def schedule(functions=2, **values):
    named = {f"worker.reward.{name}": value for name, value in values.items()}
    names = ["accuracy", "format", "math"][:functions]
    return make_reward_schedule(load_config(None, {"worker.reward.functions": names} | named), functions)


def test_weights_of_rewards():
    assert schedule(weights=None) == [(0.0, (1.0, 1.0))]
    assert schedule(weights=[2.0, 3.0]) == [(0.0, (2.0, 3.0))]
    early = {"weights": [2.0, 3.0], "early_weights": [0.5, 4.0]}
    assert schedule(**early, early_ratio=0.25) == [(0.0, (0.5, 4.0)), (0.25, (2.0, 3.0))]
    assert schedule(**early, early_ratio=0.0) == [(0.0, (2.0, 3.0))]
    steps = [[0.0, [1.0, 0.0]], [0.5, [0.0, 1.0]]]
    assert schedule(weight_schedule=steps) == [(0.0, (1.0, 0.0)), (0.5, (0.0, 1.0))]


# ------------------------------------------------------------------------------------------------------- when it is due
@pytest.mark.parametrize("every", [-1, 0])
def test_never_due(every):
    assert not any(due(step, every) for step in range(1, 10))


def test_due_at_every_third():
    assert [step for step in range(1, 10) if due(step, 3)] == [3, 6, 9]
    assert due(1, 1) and due(7, 1)


def test_attention_is_needed_when_it_is_due():
    rules = replace(make_algorithm(optimization(disable_divergence=True), 1), attention_every=4)
    assert [step for step in range(12) if "attention_mass" in rules.needs_at(step)] == [3, 7, 11], (
        "steps are counted from 1"
    )
    assert rules.needs_at(0) == rules.needs and AlgorithmSpec.seed == AlgorithmSpec.critic_warmup == 0


# ----------------------------------------------------------------------------------------- which groups are learnt from
def test_filtering_and_replay_follow_the_keys():
    config = optimization(
        online_filtering=True, filter_by="spread", filter_key="format", filter_low=0.1, filter_high=0.9, max_refills=7,
        on_short_batch="stop", replay_buffer_size=5, replay_var_epsilon=0.25, filter_min_reward=1.5,
    )  # fmt: skip
    rules = make_algorithm(config, 1)
    assert rules.filtering == Filtering(GroupFilter("spread", "format", 0.1, 0.9), 7, "stop")
    assert rules.replay == ReplayRule(replay_buffer_size=5, replay_var_epsilon=0.25, filter_min_reward=1.5)
    plain = make_algorithm(optimization(), 1)
    assert plain.filtering is None and plain.replay is None and not plain.greedy_baseline and not plain.scores_first
    assert make_algorithm(optimization(advantage_estimator="remax"), 1).greedy_baseline


def test_rewards_that_read_signals_are_not_scored_first():
    config = optimization(online_filtering=True)
    assert make_algorithm(config, 1).scores_first
    assert not make_algorithm(config, 1, rewards=[Needs(), Needs("attention_mass")]).scores_first
