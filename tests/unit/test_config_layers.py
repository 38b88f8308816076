"""The configuration: layers and overrides, keys whose null means another value, and renamed keys."""

import dataclasses

import pytest
from config_helpers import get_errors, get_value, only_error, write

from mtrl.config import Config, ConfigError, load_config, to_yaml
from mtrl.config.tree import RENAMED_KEYS, known_leaves

# --- layers and overrides ---


def test_overrides_beat_the_file_and_the_last_one_wins(tmp_path):
    path = write(tmp_path, "dataset: {seed: 1}\nworker: {rollout: {engine_kwargs: {a: 1, b: 2}}}")
    config = load_config(path, ["dataset.seed=2", "--dataset.seed", "3", "worker.rollout.engine_kwargs.b=5"])
    assert config.dataset.seed == 3
    assert config.worker.rollout.engine_kwargs == {"a": 1, "b": 5}


@pytest.mark.parametrize(
    "words",
    [
        ["worker.rollout.top_k=-1", "optimization.tis_clip=null"],
        ["--worker.rollout.top_k", "-1", "--optimization.tis_clip", "null"],
        ["--worker.rollout.top_k=-1", "--optimization.tis_clip=null"],
    ],
)
def test_the_three_spellings_of_an_override(words):
    config = load_config(None, words)
    assert config.worker.rollout.top_k == -1 and config.optimization.tis_clip is None


def test_an_override_may_set_a_section():
    assert load_config(None, ["worker.rollout.val={n: 4, temperature: 1}"]).worker.rollout.val.n == 4


def test_overrides_from_python_keep_their_types():
    config = load_config(None, {"worker.actor.optim.betas": (0.8, 0.9), "dataset.train_files": "007"})
    assert config.worker.actor.optim.betas == (0.8, 0.9) and config.dataset.train_files == "007"
    config = load_config(None, {"worker.rollout.engine_kwargs": {"sizes": (1, 2)}})
    assert config.worker.rollout.engine_kwargs == {"sizes": [1, 2]}  # as it will be after a save
    with pytest.raises(ConfigError, match=r"overrides: dataset\.seed: cannot be used"):
        load_config(None, {"dataset.seed": object()})


def test_invalid_overrides():
    assert only_error("training").startswith("command line: training: not an override")
    assert only_error("--training.fresh").startswith("command line: training.fresh: no value given")
    assert "training.fresh: no value given" in only_error("--training.fresh", "--dataset.seed=3")
    assert only_error("training.logger=[console").startswith(
        "command line: training.logger: the value cannot be read: "
    )


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "dataset:\nworker:\n  rollout:\n    # n: 4\n"])
def test_an_empty_file_and_empty_sections_are_fine(text, tmp_path):
    assert load_config(write(tmp_path, text)) == Config()


def test_anchors_and_merge_keys_work(tmp_path):
    text = "worker:\n  critic: {optim: &o {lr: 3e-5}}\n  actor: {optim: {<<: *o, name: adamw_8bit}}\n"
    optim = load_config(write(tmp_path, text)).worker.actor.optim
    assert (optim.lr, optim.name) == (3e-5, "adamw_8bit")


def test_dotted_keys_in_a_file_work(tmp_path):
    assert load_config(write(tmp_path, "worker.actor.optim.lr: 3e-5\n")).worker.actor.optim.lr == 3e-5


def test_interpolation_refers_to_other_keys(tmp_path):
    text = "dataset: {rollout_batch_size: 64}\nworker: {actor: {global_batch_size: '${dataset.rollout_batch_size}'}}"
    path = write(tmp_path, text)
    assert load_config(path).worker.actor.global_batch_size == 64
    assert load_config(path, ["dataset.rollout_batch_size=32"]).worker.actor.global_batch_size == 32
    assert "${" not in to_yaml(load_config(path))  # resolved when printed
    name = load_config(None, ["training.experiment_name=seed_${dataset.seed}"]).training.experiment_name
    assert name == "seed_42"


def test_interpolation_that_leads_nowhere():
    assert "dataset.seed: cannot be resolved" in only_error("dataset.seed=${dataset.sed}")
    assert "dataset.seed: cannot be resolved" in only_error("dataset.seed=${dataset.seed}")
    assert "dataset.seed: expected a whole number" in only_error("dataset.seed=${training.output_dir}")
    assert "cannot be resolved" in only_error("training.output_dir='???'")


@pytest.mark.parametrize("text", ["${x}", "\\${x}", "\\\\${x", "$${a}${b}", "a\\b", "${dataset.seed}"])
def test_text_that_looks_like_interpolation_survives(text, tmp_path):
    config = dataclasses.replace(Config(), dataset=dataclasses.replace(Config().dataset, system_prompt=text))
    assert load_config(write(tmp_path, to_yaml(config))) == config


# --- the meaning of null ---


@pytest.mark.parametrize(
    "overrides, name, value",
    [
        ([], "rollouts_per_prompt", 8),
        (["optimization.advantage_estimator=rloo"], "rollouts_per_prompt", 8),
        (["optimization.advantage_estimator=remax"], "rollouts_per_prompt", 1),
        (["worker.rollout.n=3"], "rollouts_per_prompt", 3),
        (["dataset.max_response_length=77"], "max_new_tokens", 77),
        (["worker.rollout.max_new_tokens=50"], "max_new_tokens", 50),
        ([], "reward_functions", ("accuracy", "format")),
        (["worker.reward.reward_fn_path=a.py:f"], "reward_functions", ("a.py:f",)),
        (["worker.reward.functions=[math]"], "reward_functions", ("math",)),
        (["worker.reward.reward_type=model", "worker.reward.model_path=m"], "reward_functions", ()),
        ([], "early_ratio", 0.1),
        (["worker.actor.optim.warmup_ratio=0.0"], "early_ratio", 0.0),
        (["worker.actor.optim.warmup_ratio=0.05", "worker.reward.early_ratio=0.0"], "early_ratio", 0.0),
    ],
)
def test_derived_values_leave_the_keys_alone(overrides, name, value):
    config = load_config(None, overrides)
    assert getattr(config, name) == value
    differing = {key for key, leaf in known_leaves().items() if get_value(config, key) != leaf.default}
    assert differing == {override.split("=")[0] for override in overrides}


# --- renamed keys ---

OLD_NAMES = "worker:\n  rollout:\n    lag: 1\n  ref: {refresh_every: 5}\n"


def test_renamed_keys_are_gone_from_the_tree_and_lead_to_it():
    assert not RENAMED_KEYS.keys() & known_leaves().keys() and set(RENAMED_KEYS.values()) <= known_leaves().keys()


def test_old_names_in_a_file_work_and_each_is_logged_once(tmp_path, caplog):
    path = write(tmp_path, OLD_NAMES)
    config = load_config(path)
    assert config.worker.rollout.off_policy_steps == 1 and config.worker.ref.sync_every == 5
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}:3: worker.rollout.lag is now called worker.rollout.off_policy_steps",
        f"{path}:4: worker.ref.refresh_every is now called worker.ref.sync_every",
    ]
    assert "lag" not in to_yaml(config) and "refresh_every" not in to_yaml(config)


@pytest.mark.parametrize(
    "overrides, where",
    [
        (["worker.rollout.lag=1"], "command line"),
        (["--worker.rollout.lag", "1"], "command line"),
        ({"worker.rollout.lag": 1}, "overrides"),
        ({"worker": {"rollout": {"lag": 1}}}, "overrides"),
    ],
)
def test_old_names_in_overrides_work_and_are_logged_once(overrides, where, caplog):
    assert load_config(None, overrides).worker.rollout.off_policy_steps == 1
    message = f"{where}: worker.rollout.lag is now called worker.rollout.off_policy_steps"
    assert [record.getMessage() for record in caplog.records] == [message]


def test_an_old_name_is_checked_like_the_new_one():
    expected = "command line: worker.rollout.off_policy_steps: expected a whole number in [0, 1], got 7"
    assert only_error("worker.rollout.lag=7") == expected


def test_old_and_new_name_at_once_are_an_error_that_names_both(tmp_path):
    path = write(tmp_path, "worker:\n  rollout:\n    off_policy_steps: 0\n    lag: 1\n")
    message = (
        "worker.rollout.lag: the old name of worker.rollout.off_policy_steps, which is set too; remove "
        "worker.rollout.lag"
    )
    assert get_errors(path) == [f"{path}:4: {message}"]
    assert only_error("worker.rollout.lag=1", "worker.rollout.off_policy_steps=1") == f"command line: {message}"


def test_an_override_by_the_new_name_wins_over_a_file_with_the_old_one(tmp_path):
    path = write(tmp_path, OLD_NAMES)
    assert load_config(path, ["worker.rollout.off_policy_steps=0"]).worker.rollout.off_policy_steps == 0
    new = write(tmp_path, "worker: {rollout: {off_policy_steps: 0}}\n")
    assert load_config(new, ["worker.rollout.lag=1"]).worker.rollout.off_policy_steps == 1


def test_the_saved_configuration_of_an_older_run_loads_silently(tmp_path, caplog):
    text = to_yaml(load_config(None, {"worker.rollout.off_policy_steps": 1, "worker.ref.sync_every": 5}))
    old = write(tmp_path, text.replace("off_policy_steps:", "lag:").replace("sync_every:", "refresh_every:"))
    config = load_config(old, saved=True)
    assert config.worker.rollout.off_policy_steps == 1 and config.worker.ref.sync_every == 5
    assert not caplog.records
