"""The arms of the study: all load, differ from plain GRPO only in their own setting, and cover every rule."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.update_size import update_norms
from mtrl.algorithms.credit.registry import RULES
from mtrl.algorithms.credit.shuffled import Shuffled
from mtrl.compose.algorithm import make_credit_rules, make_reward_schedule
from mtrl.config import load_config
from mtrl.config.packaged import CONFIG_DIR
from mtrl.config.tree import known_leaves
from mtrl.config.unsupported import find_unsupported

ROOT = Path(__file__).resolve().parents[2]
ARMS = sorted(path.stem for path in (CONFIG_DIR / "study").glob("*.yaml"))
EXPERIMENTS = [f"experiment{number}" for number in range(1, 6)]
SPEAKING = {  # the rules of an arm that is not called as its rule
    "tgf_20": ["perception_filter"], "tgf_40": ["perception_filter"], "tas": ["trajectory_scaling"],
    "tprl": ["perception_filter", "trajectory_scaling"], "entropy_only": ["entropy_filter"],
    "union": ["perception_filter", "entropy_filter"], "experiment5": ["attention_weights"],
    "shuffled_tokens": ["shuffled"], "shuffled_rows": ["shuffled"],
} | {f"random_{share}": ["random_filter"] for share in (10, 20, 40)}  # fmt: skip
SPEAKING |= {name: [] for name in ("grpo", "grpo_matched", "blank", *EXPERIMENTS[:4])}
BESIDE_CREDIT = {  # keys that an arm may change besides `optimization` and its name
    "grpo_matched": {"worker.actor.optim.lr"},
    "blank": {"dataset.train_files", "dataset.val_files"},
} | {
    name: {"worker.reward.functions", "worker.reward.weights", "worker.reward.early_weights",
           "worker.reward.soft_punish_cache", "worker.actor.optim.lr_scheduler_type",
           "worker.actor.optim.warmup_ratio", "worker.actor.optim.warmup_steps"}
    for name in EXPERIMENTS
}  # fmt: skip


def arm(name):
    return load_config(f"study/{name}.yaml")


def value(config, key):
    for part in key.split("."):
        config = getattr(config, part)
    return config


def get_rule_names(config):
    names = {kind: name for name, kind in RULES.items()}
    return ["shuffled" if isinstance(rule, Shuffled) else names[type(rule)] for rule in make_credit_rules(config)]


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_is_plain_grpo_except_for_its_setting(name):
    config, plain = arm(name), arm("grpo")
    assert find_unsupported(config) == [] and config.training.experiment_name == name
    assert get_rule_names(config) == SPEAKING.get(name, [name])
    differ = {key for key in known_leaves() if value(config, key) != value(plain, key)} - {"training.experiment_name"}
    assert {key for key in differ if not key.startswith("optimization.")} <= BESIDE_CREDIT.get(name, set())
    assert name in ("grpo", "grpo_matched") or differ


def test_no_rule_is_left_out():
    """But for those of papers to the letter, which are younger than the study."""
    assert {rule for name in ARMS for rule in get_rule_names(arm(name))} == RULES.keys() - {
        "pgpo",
        "vepo",
        "vgpo",
        "pepo",
        "dyco",
        "ktae",
    }


def test_the_plain_arm_is_the_recipe_of_scenes():
    config, spec = arm("grpo"), load_config(ROOT / "mtrl/embedded/scenes.yaml")
    differ = {key for key in known_leaves() if value(config, key) != value(spec, key)}
    measuring = {"val_freq", "val_before_train", "val_generations_to_log", "log_preview_chars", "best_metric",
                 "record_rollouts_per_step", "realtime_rollout_logging", "project_name", "experiment_name"}  # fmt: skip
    assert differ - {"dataset.val_files", "dataset.val_batch_size"} <= {f"training.{name}" for name in measuring}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_match_the_spec(name):
    ours, theirs = arm(name), load_config(f"experiments/{name}.yaml")
    assert ours.worker.reward.functions == theirs.worker.reward.functions
    assert make_reward_schedule(ours, 60)[0][1] == make_reward_schedule(theirs, 60)[0][1]
    assert ours.worker.reward.weights == theirs.worker.reward.weights
    assert ours.optimization == theirs.optimization


def test_the_page_names_every_arm():
    page = (ROOT / "docs/study.md").read_text()
    arms = page.partition("## Task, model, budget")[2].partition("## Hypotheses")[0]
    first_cells = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", arms, re.MULTILINE)
    assert sorted(re.findall(r"\w+", " ".join(first_cells))) == ARMS


def test_update_norms_by_hand(tmp_path):
    """Steps of (3, 4) and (0, 5): norms 5 and 5, the second from where the first has led."""
    weights = [[0.0, 0.0], [3.0, 4.0], [3.0, 9.0]]
    places = [tmp_path / "start", *(tmp_path / "run/checkpoints" / f"step_{step}" for step in (1, 2))]
    for place, (a, b) in zip(places, weights, strict=True):
        place.mkdir(parents=True)
        save_file({"a": torch.tensor([a]), "b": torch.tensor([[b]])}, place / "model.safetensors")
    assert update_norms(places[0], tmp_path / "run", steps=2) == pytest.approx([5.0, 5.0])
