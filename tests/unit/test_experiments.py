"""The experiments that ship as configurations: the spec's table, their shrunk forms, the grid."""

import os
import subprocess
from pathlib import Path

import pytest

from mtrl.build.recipe import reward_schedule
from mtrl.build.run import build
from mtrl.build.unbuilt import unbuilt
from mtrl.config import load_config
from mtrl.config.tree import known_leaves
from mtrl.tracking.run_files import read_rows

HOME = Path(__file__).resolve().parents[2] / "mtrl/configs/experiments"
FULL = sorted(path.stem for path in HOME.glob("*.yaml"))
SHRUNK = sorted(path.stem for path in (HOME / "zoo").glob("*.yaml"))
NUMBERED = {  # functions beside accuracy, format and length; weights; early weights: the table of the spec
    "experiment1": ("vgr", (2.5, 0, 0.5, 1), (1, 0, 2, 1)),
    "experiment2": ("vgr", (0, 2.5, 0.5, 1), (0, 1, 2, 1)),
    "experiment3": ("vgr", (2.5, 1, 0.5, 1), (1, 1, 2, 1)),
    "experiment3_lora": ("vgr", (2.5, 1, 0.5, 1), (1, 1, 2, 1)),
    "experiment4": ("vgr_hard_negative", (2.5, 1, 0.5, 1), (1, 1, 2, 1)),
    "experiment5": ("vgr", (2.5, 0, 0.5, 1), (1, 0, 2, 1)),
}
OF_SIZE = {  # what a shrunk form may change: model, data, sizes, speed, and the two switches that are still to come
    "dataset.train_files", "dataset.val_files", "dataset.prompt_key", "dataset.format_prompt", "dataset.min_pixels",
    "dataset.max_pixels", "dataset.max_prompt_length", "dataset.max_response_length", "dataset.rollout_batch_size",
    "dataset.val_batch_size", "training.experiment_name", "training.max_steps", "training.total_epochs",
    "training.val_freq", "training.save_freq", "optimization.disable_divergence", "optimization.online_filtering",
    "optimization.replay_buffer_size", "optimization.filter_min_reward", "worker.actor.model.model_path",
    "worker.actor.model.enable_gradient_checkpointing", "worker.actor.optim.lr", "worker.actor.optim.warmup_steps",
    "worker.actor.fsdp.mixed_precision_dtype", "worker.actor.global_batch_size", "worker.actor.tokens_per_micro_batch",
    "worker.reward.soft_punish_cache", "worker.reward.num_cpus",
}  # fmt: skip


def full(name):
    return load_config(HOME / f"{name}.yaml", {})


def shrunk(name, **overrides):
    return load_config(HOME / "zoo" / f"{name}.yaml", overrides)


def value(config, key):
    for part in key.split("."):
        config = getattr(config, part)
    return config


def test_all_of_the_spec_are_there():
    others = {"plain_ppo", "tprl_filtering", "tprl_full", "entropy_filtering", "attention_4_1_1", "dapo", "vppo"}
    assert set(FULL) == {*NUMBERED, *others}
    assert set(SHRUNK) == set(FULL) - {"experiment3_lora"}


@pytest.mark.parametrize("name", NUMBERED)
def test_numbered_experiments_are_those_of_the_table(name):
    config, (grounding, weights, early) = full(name), NUMBERED[name]
    reward, optimization, actor = config.worker.reward, config.optimization, config.worker.actor
    assert reward.functions == ("accuracy", grounding, "format", "length")
    assert reward_schedule(config, 4) == [(0.0, early), (0.05, weights)]
    assert optimization.enable_token_weights == (name == "experiment5")
    assert actor.model.peft_type == ("lora" if name == "experiment3_lora" else None)
    assert (config.training.total_epochs == 1) == (name == "experiment4")
    assert optimization.filter_min_reward == (1.0 if name == "experiment4" else 2.0)
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
    assert differ <= ideas | shape | {"training.experiment_name"}, "DAPO is VPPO without its ideas"


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
    if name in ("dapo", "vppo"):
        differ.remove("worker.reward.functions")  # the embedded task is multiple choice
    assert not differ
    assert small.worker.actor.model.model_path is None and not small.dataset.train_files
    assert small.dataset.rollout_batch_size * small.training.max_steps <= 16 * 24, "minutes, not hours"


@pytest.mark.parametrize("name", FULL)
def test_full_ones_say_what_is_still_to_come(name):
    """And what to set; nothing stands in the way but adapters."""
    config = full(name)
    said = unbuilt(config)
    assert all(";" in line and "not built yet" in line for line in said)


@pytest.mark.parametrize("name", SHRUNK)
def test_shrunk_ones_start(name, tmp_path):
    config = shrunk(name, **{"training.output_dir": str(tmp_path), "training.logger": ()})
    assert unbuilt(config) == []
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
@pytest.mark.parametrize("name", ["experiment3", "experiment5"])
def test_shrunk_ones_learn(name, tmp_path):
    config = shrunk(name, **{"training.output_dir": str(tmp_path), "training.logger": ()})
    run = build(config)
    run.train()
    rows = read_rows(run.directory / "metrics.jsonl")
    accuracy = [row["val/avg@4"] for row in rows if "val/avg@4" in row]
    assert accuracy[-1] > accuracy[0] + 0.2
    steps = [row for row in rows if "perf/seconds_step" in row]
    assert len(steps) == 24 and all("attention/vgr_late" in row for row in steps)
