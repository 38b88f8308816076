"""From the config to a recipe."""

import pytest

from mtrl.build.recipe import optimizer_settings, recipe_of, total_steps
from mtrl.config import load_config
from mtrl.training.recipe import due


# ----------------------------------------------------------------------------------------------------- from the config
@pytest.mark.parametrize(
    ("overrides", "rows", "steps"),
    [
        ({"training.total_epochs": 3, "dataset.rollout_batch_size": 4}, 10, 7),  # 30 prompts, 4 a step
        ({"training.total_epochs": 1, "dataset.rollout_batch_size": 4}, 3, 1),
        ({"training.max_steps": 5}, 10, 5),
    ],
)
def test_total_steps(overrides, rows, steps):
    overrides = {"worker.actor.global_batch_size": 1} | overrides
    assert total_steps(load_config(None, overrides), rows) == steps


def test_optimizer_steps_of_a_run():
    config = load_config(
        None,
        {
            "dataset.rollout_batch_size": 8,
            "worker.actor.global_batch_size": 2,
            "worker.actor.ppo_epochs": 3,
            "worker.actor.optim.warmup_ratio": 0.1,
            "worker.actor.optim.warmup_steps": 99,
        },
    )
    optimization = optimizer_settings(config, steps=10)
    assert optimization.total_steps == 10 * 4 * 3 and optimization.warmup_steps == 12
    rules = recipe_of(config, 10)
    assert (rules.prompts_per_step, rules.batches.prompts_per_update, rules.batches.passes) == (8, 2, 3)


def test_dr_grpo_divides_by_the_length_of_the_config():
    config = load_config(None, {"worker.rollout.max_new_tokens": 4, "dataset.max_response_length": 8})
    rules = recipe_of(config, 1)
    assert rules.sampling.max_new_tokens == 4 and rules.batches.max_response_length == 8


@pytest.mark.parametrize("every", [-1, 0])
def test_never_due(every):
    assert not any(due(step, every) for step in range(1, 10))
