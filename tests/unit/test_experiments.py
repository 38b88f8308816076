"""The experiments that ship as configurations: the spec's table, their shrunk forms, the grid."""

import math
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from mtrl.compose.algorithm import make_reward_schedule
from mtrl.compose.run import build
from mtrl.config import load_config
from mtrl.config.tree import known_leaves
from mtrl.config.unsupported import find_unsupported
from mtrl.tracking.jsonl import read_rows

HOME = Path(__file__).resolve().parents[2] / "mtrl/configs/experiments"
FULL = sorted(path.stem for path in HOME.glob("*.yaml"))
SHRUNK = sorted(path.stem for path in (HOME / "zoo").glob("*.yaml"))
NUMBERED = {  # the spec's table: functions besides accuracy, format and length; weights; early weights
    "experiment1": ("vgr", (2.5, 0, 0.5, 1), (1, 0, 2, 1)),
    "experiment2": ("vgr", (0, 2.5, 0.5, 1), (0, 1, 2, 1)),
    "experiment3": ("vgr", (2.5, 1, 0.5, 1), (1, 1, 2, 1)),
    "experiment3_lora": ("vgr", (2.5, 1, 0.5, 1), (1, 1, 2, 1)),
    "experiment4": ("vgr_hard_negative", (2.5, 1, 0.5, 1), (1, 1, 2, 1)),
    "experiment5": ("vgr", (2.5, 0, 0.5, 1), (1, 0, 2, 1)),
}
ALGORITHMS = {"ppo_gae", "grpo", "dapo", "dr_grpo", "gspo", "cispo", "reinforce_plus_plus", "rloo", "remax"}
CREDIT = {"plain_ppo", "tprl_filtering", "tprl_full", "entropy_filtering", "attention_4_1_1", "vppo"}
OF_SIZE = {  # keys that a shrunk form may change: model, data, sizes, speed
    "dataset.train_files", "dataset.val_files", "dataset.prompt_key", "dataset.format_prompt", "dataset.min_pixels",
    "dataset.max_pixels", "dataset.max_prompt_length", "dataset.max_response_length", "dataset.rollout_batch_size",
    "dataset.val_batch_size", "training.experiment_name", "training.max_steps", "training.total_epochs",
    "training.val_freq", "training.save_freq", "worker.actor.model.model_path",
    "worker.actor.model.enable_gradient_checkpointing", "worker.actor.optim.lr", "worker.actor.optim.warmup_steps",
    "worker.actor.fsdp.mixed_precision_dtype", "worker.actor.global_batch_size", "worker.actor.tokens_per_micro_batch",
    "worker.critic.optim.lr", "worker.critic.warmup_steps", "worker.reward.soft_punish_cache", "worker.reward.num_cpus",
}  # fmt: skip
OF_THE_TASK = {  # the embedded task is multiple choice, with no box and no formula
    "dapo": {"worker.reward.functions", "optimization.filter_key"},
    "vppo": {"worker.reward.functions"},
    "text_maths": {"worker.reward.functions", "dataset.answer_key"},
} | {name: {"optimization.disable_divergence"} for name in CREDIT - {"vppo"}}  # without a reference, for speed
WAITS: dict[str, set[str]] = {}  # settings of each that are not supported yet


def full(name):
    return load_config(HOME / f"{name}.yaml", {})


def shrunk(name, **overrides):
    return load_config(HOME / "zoo" / f"{name}.yaml", overrides)


def value(config, key):
    for part in key.split("."):
        config = getattr(config, part)
    return config


def test_all_of_the_spec_are_there():
    assert set(FULL) == {*NUMBERED, *ALGORITHMS, *CREDIT, "text_maths"}
    assert set(SHRUNK) == set(FULL) - {"experiment3_lora"}


@pytest.mark.parametrize("name", NUMBERED)
def test_numbered_experiments_match_the_table(name):
    config, (grounding, weights, early) = full(name), NUMBERED[name]
    reward, optimization, actor = config.worker.reward, config.optimization, config.worker.actor
    assert reward.functions == ("accuracy", grounding, "format", "length")
    assert make_reward_schedule(config, 4) == [(0.0, early), (0.05, weights)]
    assert optimization.enable_token_weights == (name == "experiment5")
    assert actor.model.peft_type == ("lora" if name == "experiment3_lora" else None)
    assert (config.training.total_epochs == 1) == (name == "experiment4")
    assert optimization.filter_min_reward == (1.0 if name in ("experiment2", "experiment4") else 2.0)
    assert optimization.disable_divergence, "section 9: no divergence"
    assert actor.model.model_path == "Qwen/Qwen2.5-VL-7B-Instruct" and actor.fsdp.mixed_precision_dtype == "bf16"
    assert (actor.optim.lr, actor.optim.lr_scheduler_type, actor.optim.warmup_ratio) == (1e-5, "cosine", 0.05)
    assert (actor.max_grad_norm, config.rollouts_per_prompt, reward.soft_punish_cache) == (1.0, 8, 50)
    assert (optimization.replay_buffer_size, optimization.replay_var_epsilon) == (64, 1e-6)
    assert (config.dataset.max_prompt_length, config.dataset.max_response_length) == (1024, 384)
    assert (config.training.val_freq, config.worker.rollout.val.n, config.worker.rollout.val.temperature) == (10, 4, 1)


def test_the_published_settings():
    vppo, dapo = full("vppo"), full("dapo")
    wanted = {
        "optimization.top_p_perception_tokens": 0.4, "optimization.trajectory_scaling_min": 0.9,
        "optimization.entropy_penalty_coef": 0.06, "optimization.use_entropy_penalty": True,
        "optimization.enable_perception_filtering": True, "optimization.enable_trajectory_reweighting": True,
        "optimization.enable_entropy_filtering": False, "optimization.disable_divergence": True,
        "optimization.online_filtering": True, "worker.actor.clip_ratio_low": 0.2, "worker.actor.clip_ratio_high": 0.28,
        "worker.actor.optim.lr": 1e-6, "worker.rollout.n": 8, "worker.reward.functions": ("math",),
    }  # fmt: skip
    assert {key: value(vppo, key) for key in wanted} == wanted
    differ = {key for key in known_leaves() if value(vppo, key) != value(dapo, key)}
    ideas = {key for key in wanted if "enable_p" in key or "enable_t" in key or "top_p" in key or "penalty" in key}
    shape = {"optimization.trajectory_scaling_min", "optimization.trajectory_scaling_max"}
    shaping = {"optimization.filter_key", "worker.reward.functions", "worker.reward.weights",
               "worker.reward.soft_punish_cache"}  # fmt: skip
    assert differ <= ideas | shape | shaping | {"training.experiment_name"}, (
        "VPPO is DAPO with token credit instead of shaping"
    )


def test_the_four_parts_of_dapo():
    config = full("dapo")
    actor, algorithm, reward = config.worker.actor, config.optimization, config.worker.reward
    assert actor.clip_ratio_low < actor.clip_ratio_high == 0.28, "clip-higher"
    assert algorithm.online_filtering and algorithm.filter_key == "math", "dynamic sampling, by accuracy"
    assert 0 <= algorithm.filter_low < 1 / 8 and 7 / 8 < algorithm.filter_high <= 1, "all right or all wrong, of 8"
    assert algorithm.loss_type == "dapo", "a token-level loss"
    assert reward.functions == ("math", "length") and reward.soft_punish_cache == 512, "overlong shaping"
    assert algorithm.disable_divergence


def test_the_keys_of_each_algorithm():
    """Checks the keys that define it; token credit is off."""

    def of(name, *keys):
        return tuple(getattr(full(name).optimization, key) for key in keys)

    estimators = {name: of(name, "advantage_estimator")[0] for name in ALGORITHMS}
    assert estimators == dict.fromkeys(ALGORITHMS, "grpo") | {
        "ppo_gae": "gae", "rloo": "rloo", "remax": "remax", "reinforce_plus_plus": "reinforce_plus_plus",
    }  # fmt: skip
    assert {name: of(name, "policy_loss")[0] for name in ALGORITHMS} == dict.fromkeys(ALGORITHMS, "ppo") | {
        "gspo": "gspo", "cispo": "cispo",
    }  # fmt: skip
    assert of("grpo", "scale_rewards", "loss_type", "use_divergence_loss") == ("group", "grpo", True)
    assert of("dr_grpo", "scale_rewards", "loss_type", "disable_divergence") == ("none", "dr_grpo", True)
    assert of("gspo", "loss_type") == ("grpo",) and full("gspo").worker.actor.clip_ratio_high == 4e-4
    assert of("ppo_gae", "gamma", "lam", "use_divergence_loss") == (1.0, 0.95, False)
    steps = {name: full(name).dataset.rollout_batch_size // full(name).worker.actor.global_batch_size
             for name in ("gspo", "cispo", "ppo_gae", "dapo")}  # fmt: skip
    assert steps == {"gspo": 4, "cispo": 4, "ppo_gae": 4, "dapo": 3}, (
        "a ratio other than 1 needs several optimizer steps"
    )
    groups = {name: full(name).rollouts_per_prompt for name in ALGORITHMS}
    assert {name for name, n in groups.items() if n == 1} == {"ppo_gae", "remax", "reinforce_plus_plus"}
    maths = full("text_maths")
    assert maths.worker.reward.functions == ("math",) and "VL" not in maths.worker.actor.model.model_path


def test_the_ratio_of_411():
    reward = full("attention_4_1_1").worker.reward
    assert reward.functions == ("accuracy", "think_format", "mdi") and reward.weights == (4, 1, 1)


def test_four_ablations_of_token_credit():
    switches = ("perception_filtering", "trajectory_reweighting", "entropy_filtering", "token_weights")
    on = {
        name: {each for each in switches if getattr(full(name).optimization, f"enable_{each}")}
        for name in ("plain_ppo", "tprl_filtering", "tprl_full", "entropy_filtering")
    }
    assert on == {
        "plain_ppo": set(),
        "tprl_filtering": {"perception_filtering"},
        "tprl_full": {"perception_filtering", "trajectory_reweighting"},
        "entropy_filtering": {"entropy_filtering"},
    }


@pytest.mark.parametrize("name", SHRUNK)
def test_a_shrunk_form_differs_in_size_alone(name):
    large, small = full(name), shrunk(name)
    differ = {key for key in known_leaves() if value(large, key) != value(small, key)} - OF_SIZE
    assert differ == OF_THE_TASK.get(name, set())
    assert small.worker.actor.model.model_path is None and bool(small.dataset.train_files) == (name == "text_maths")
    responses = small.dataset.rollout_batch_size * small.rollouts_per_prompt
    assert responses * small.training.max_steps <= 8 * 16 * 24, "minutes, not hours"


@pytest.mark.parametrize("name", FULL)
def test_full_ones_report_unsupported_settings(name):
    """And what to set; there is no other error."""
    said = find_unsupported(full(name))
    assert all(";" in line and "not supported with" in line for line in said)
    assert {line.partition(";")[0].partition(":")[0] for line in said} == WAITS.get(name, set())


def test_every_recipe_is_on_the_page():
    """docs/recipes.md lists exactly these by name."""
    page = (HOME.parents[2] / "docs/recipes.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)` ", page, re.MULTILINE)) == FULL


@pytest.mark.parametrize("name", [name for name in SHRUNK if name not in WAITS])
def test_shrunk_ones_start(name, tmp_path, few_rows):
    config = shrunk(name, **{"training.output_dir": str(tmp_path), "training.logger": ()})
    assert find_unsupported(config) == []
    run = build(config)
    run.closing.close()


def test_prompts_of_the_experiments_are_there():
    for config in map(full, FULL):
        assert Path(config.dataset.format_prompt).is_absolute() and Path(config.dataset.format_prompt).is_file()


def test_the_grid_is_18_different_runs():
    script = HOME / "token_weight_grid.sh"
    base = HOME / "zoo/experiment5.yaml"
    command = ["bash", str(script), str(base), "training.max_steps=2"]
    said = subprocess.run(command, env=os.environ | {"MTRL": "echo"}, capture_output=True, text=True, check=True).stdout
    runs = [line.split() for line in said.splitlines()]
    assert all(words[:2] == ["train", str(base)] for words in runs)
    found = set()
    for words in runs:
        config = load_config(base, words[2:])
        assert config.training.max_steps == 2 and config.optimization.enable_token_weights
        weights = config.optimization
        found.add((weights.token_weight_top_ratio, weights.token_weight_smooth_sigma, weights.token_weight_clip))
    assert found == {(r, s, c) for r in (0.2, 0.4, 0.6) for s in (0, 1, 2) for c in ((0.5, 2), (0.2, 3))}
    assert len({word for words in runs for word in words if "experiment_name" in word}) == len(runs) == 18


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SHRUNK if name not in WAITS])
def test_shrunk_ones_train(name, tmp_path):
    """Two steps of each as it is written, after which its weights are others; a critic learns alone before them."""
    config = shrunk(name)
    steps = 2 + (config.worker.critic.warmup_steps if config.optimization.advantage_estimator == "gae" else 0)
    changes = {"training.output_dir": str(tmp_path), "training.logger": (), "training.max_steps": steps}
    run = build(shrunk(name, **changes))
    run.loop.components.validation = None
    model = run.loaded.model
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    run.train()
    rows = read_rows(run.directory / "metrics.jsonl")
    assert len(rows) == steps and all(math.isfinite(x) for row in rows for x in row.values() if isinstance(x, float))
    assert any(not torch.equal(weight, before[key]) for key, weight in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experiment1", "experiment3", "experiment4", "experiment5"])
def test_shrunk_ones_learn(name, tmp_path):
    config = shrunk(name, **{"training.output_dir": str(tmp_path), "training.logger": ()})
    run = build(config)
    run.train()
    rows = read_rows(run.directory / "metrics.jsonl")
    accuracy = [row["val/avg@4"] for row in rows if "val/avg@4" in row]
    assert accuracy[-1] > accuracy[0] + 0.2
    steps = [row for row in rows if "perf/seconds_step" in row]
    assert len(steps) == 24 and all("attention/vgr_late" in row for row in steps)
    assert steps[-1]["replay/size"] > 0 and sum(row.get("replay/hits", 0.0) for row in steps) > 0
