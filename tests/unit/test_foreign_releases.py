"""The tables of `mtrl convert` against every default of pinned releases (tests/data/foreign_defaults.yaml)."""

import dataclasses
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import yaml

from mtrl.config.conversions import CONVERSIONS
from mtrl.config.foreign_config import LOST, UNREAD, ConfigConverter
from mtrl.config.foreign_defaults import DEFAULTS, SameAs
from mtrl.config.foreign_keys import TABLES, iterate_same_names
from mtrl.config.tree import known_leaves

RELEASES = yaml.safe_load((Path(__file__).parents[1] / "data" / "foreign_defaults.yaml").read_text())
# Describe the machine, the folders and the data of a run, not how it trains.
MACHINE = {
    "training.project_name", "training.experiment_name", "training.output_dir", "training.logger", "training.nnodes",
    "training.n_gpus_per_node", "training.val_generations_to_log", "training.realtime_rollout_logging",
    "dataset.train_files", "dataset.val_files", "dataset.val_batch_size", "worker.actor.model.model_path",
    "worker.critic.model.model_path", "worker.actor.model.trust_remote_code", "worker.actor.dynamic_batching",
    "worker.actor.tokens_per_micro_batch", "worker.actor.micro_batch_size_per_device_for_update",
    "worker.actor.micro_batch_size_per_device_for_experience", "worker.rollout.engine_kwargs",
    "worker.rollout.gpu_memory_utilization", "worker.rollout.tensor_parallel_size", "worker.reward.num_cpus",
    "worker.actor.use_torch_compile", "worker.actor.model.enable_gradient_checkpointing",
}  # fmt: skip


def keys_of(project):
    keys = {key for owner, table in TABLES.items() if project in owner.split(" and ") for key in table}
    return keys | {name for owner, name in iterate_same_names() if owner == project} | set(CONVERSIONS[project])


def run_values(project, flat):
    converted = ConfigConverter(project, flat, {}, 1)
    return converted, {key: leaf.default for key, leaf in known_leaves().items()} | converted.values


@pytest.mark.parametrize("project", RELEASES)
def test_every_default_in_our_table_is_that_of_the_release(project):
    theirs = RELEASES[project]["defaults"]
    ours = {key: value for key, value in DEFAULTS[project].items() if not isinstance(value, SameAs)}
    assert ours == {key: theirs[key] for key in ours}


@pytest.mark.parametrize("project", RELEASES)
def test_every_key_in_our_tables_is_one_of_the_release(project):
    """Or it is listed as one of other releases."""
    release = RELEASES[project]
    assert sorted(keys_of(project) - release["defaults"].keys()) == release["other_releases"]


@pytest.mark.parametrize("project", RELEASES)
def test_a_file_with_all_defaults_is_the_same_run_as_one_without_them(project):
    _, with_all = run_values(project, RELEASES[project]["defaults"])
    _, with_none = run_values(project, {})
    differ = {key: (with_all[key], with_none[key]) for key in with_all if with_all[key] != with_none[key]}
    assert {key: values for key, values in differ.items() if key not in MACHINE} == {}


@pytest.mark.parametrize("project", RELEASES)
def test_nothing_is_lost_of_a_file_with_all_defaults(project):
    converted = ConfigConverter(project, RELEASES[project]["defaults"], {}, 1)
    lines = [line.text.split(" = ")[0] for line in converted.lines if line.kind in (LOST, UNREAD)]
    of_verl = ["reward.reward_manager.name", "worker.rollout.tensor_parallel_size"]  # 2, and no engine
    assert lines == {"verl": of_verl, "EasyR1": ["worker.rollout.n"]}.get(project, [])


def test_the_table_of_trl_is_that_of_the_installed_release():
    try:
        installed = version("trl")
    except PackageNotFoundError:
        pytest.skip("trl is not installed")
    if installed != RELEASES["TRL"]["release"]:
        pytest.skip(f"trl {installed} is installed")
    import trl

    found = {}
    for cls in (trl.GRPOConfig, trl.ModelConfig, trl.ScriptArguments):
        for item in dataclasses.fields(cls):
            value = item.default if item.default is not dataclasses.MISSING else item.default_factory()
            found.setdefault(item.name, getattr(value, "value", value))
    assert found == RELEASES["TRL"]["defaults"]
