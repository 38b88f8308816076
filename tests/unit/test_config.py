"""The configuration: loading, types, and saving."""

import dataclasses
import math
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from config_helpers import get_errors, get_value, only_error, write
from omegaconf import DictConfig, ListConfig

from mtrl.config import Config, ConfigError, find_warnings, load_config, to_dict, to_yaml
from mtrl.config.key_reference import make_reference
from mtrl.config.tree import Leaf, known_leaves, known_sections
from mtrl.config.yaml_io import YamlFile
from mtrl.utils.value_types import parse_interval

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "config-reference.yaml"
FULL_RUN = ROOT / "tests" / "data" / "full_run.yaml"


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted key; free-form mappings stay whole."""
    leaves = {}
    for name, value in tree.items():
        if prefix + name in known_sections():
            leaves.update(flat(value, f"{prefix}{name}."))
        else:
            leaves[prefix + name] = value
    return leaves


# --- the tree and its reference ---


def test_the_reference_has_exactly_the_keys_and_defaults_of_the_tree():
    written = flat(YamlFile(REFERENCE.read_text(encoding="utf-8")).content)
    defaults = {key: leaf.default for key, leaf in known_leaves().items()}
    assert list(written) == list(defaults)  # same keys, same order
    for key, default in defaults.items():
        plain = list(default) if isinstance(default, tuple) else default
        assert (written[key], type(written[key])) == (plain, type(plain)), key


def test_the_reference_loads_unchanged():
    assert load_config(REFERENCE) == Config() == load_config()


def test_the_reference_equals_the_tree():
    assert REFERENCE.read_text(encoding="utf-8") == make_reference(), "out of date: make reference"
    for line in REFERENCE.read_text(encoding="utf-8").splitlines():
        assert len(line) <= 120 and (line.endswith(":") or "#" in line or not line), line


def test_every_default_satisfies_its_own_type_and_range():
    everything = {key: leaf.default for key, leaf in known_leaves().items()}
    assert load_config(None, everything) == Config()


def test_every_key_has_a_description():
    assert [key for key, leaf in known_leaves().items() if len(leaf.meaning) < 5 or "\n" in leaf.meaning] == []


def test_the_result_is_frozen_and_plain_python():
    config = load_config(FULL_RUN)
    for section in ("", *known_sections()):
        node = get_value(config, section) if section else config
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(node, dataclasses.fields(node)[0].name, None)
    for key in known_leaves():
        assert not isinstance(get_value(config, key), (DictConfig, ListConfig, list)), key
    assert type(config.worker.rollout.engine_kwargs["limit_mm_per_prompt"]) is dict


def test_two_configs_do_not_share_their_free_form_mappings():
    assert Config().worker.rollout.engine_kwargs is not Config().worker.rollout.engine_kwargs


# --- every key, changed from its default, survives load, save, load ---

# Keys that cannot be changed alone, and the keys that must change with them.
COMPANIONS: dict[str, dict[str, Any]] = {
    "dataset.min_pixels": {"dataset.max_pixels": 2**30},
    "dataset.rollout_batch_size": {"worker.actor.global_batch_size": 1},
    "worker.actor.fsdp.param_rounding": {"worker.actor.fsdp.param_dtype": "bf16"},
    "worker.actor.ulysses_size": {"training.n_gpus_per_node": 2},
    "worker.rollout.tensor_parallel_size": {"training.n_gpus_per_node": 2, "worker.rollout.name": "vllm"},
    "worker.rollout.mode": {"worker.rollout.address": "localhost:8000", "worker.rollout.name": "vllm"},
    "worker.hybrid_engine": {"worker.rollout.n_gpus": 1},
    "worker.rollout.n_gpus": {"worker.hybrid_engine": False},
    "worker.reward.reward_type": {"worker.reward.model_path": "org/reward-model"},
}
# Values whose type alone does not determine their form.
OTHERS: dict[str, Any] = {
    "optimization.token_weight_clip": [0.5, 2.0],
    "worker.actor.global_batch_size": 128,
    "worker.reward.functions": ["math", "rewards/mine.py:score"],
    "worker.reward.weights": [2.0, 0.5],
    "worker.reward.early_weights": [0.25, 1.0],
    "worker.reward.weight_schedule": [[0.0, [1.0, 2.0]], [0.3, [0.5, 5e-7]]],
    "worker.rollout.n": 5,
    "worker.rollout.max_new_tokens": 300,
}


def another(annotation: Any, within: str | None, default: Any) -> Any:
    """A value of the annotation, inside its range, that is not the default."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        wanted = [member for member in args if member is not type(None)]
        return another(wanted[-1], within, default)  # for `int | Literal["auto"]` the literal
    if origin is Literal:
        return next(word for word in reversed(args) if word != default)
    if origin is tuple:
        return [another(args[0], within, None), another(args[0], within, None)]
    if origin is Mapping:
        return {"alpha": 5e-7, "name": "5e-7", "date": "2024-01-01", "nested": {"on": [True, None, "${x}"]}}
    if annotation is bool:
        return not default
    if annotation is str:
        return f"other {default}: ${{x}} # 答案"
    return another_number(annotation, within, default)


def another_number(kind: type, within: str | None, default: Any) -> Any:
    low, high, _, _ = parse_interval(within)
    if math.isinf(low) or math.isinf(high):
        return (default or 0) + kind(1)
    between = [kind(low + (high - low) * share) for share in (0.123456789, 0.5, 1.0)]
    return next(number for number in between if number != default)


def changed(key: str, leaf: Leaf) -> Any:
    if key in OTHERS:
        return OTHERS[key]
    if key == "optimization.compute_attention_metrics":
        return False
    if leaf.names:
        other = {"name": "mine.py:Mine", "strength": 0.5}
        return [other, leaf.names[-1]] if isinstance(leaf.default, tuple) else other
    return another(leaf.annotation, leaf.within, leaf.default)


def escaped(value: Any) -> Any:
    """As a user writes text with a literal `${` in it."""
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, dict):
        return {name: escaped(item) for name, item in value.items()}
    return [escaped(item) for item in value] if isinstance(value, list) else value


def as_kept(value: Any) -> Any:
    return tuple(as_kept(item) for item in value) if isinstance(value, list) else value


def test_a_changed_key_survives_load_save_load(tmp_path):
    """Each key is changed alone; they are saved together, as many as go together."""
    changes: list[dict[str, Any]] = []
    for key, leaf in known_leaves().items():
        value = changed(key, leaf)
        settings = {**COMPANIONS.get(key, {}), key: escaped(value)}
        kept = get_value(load_config(None, settings), key)
        assert kept == (value if isinstance(value, dict) else as_kept(value)), key
        assert kept != leaf.default, key
        changes.append(settings)
    for settings in combine(changes):
        loaded = load_config(None, settings)
        again = load_config(write(tmp_path, to_yaml(loaded)))
        assert again == loaded
        assert all(type(get_value(again, key)) is type(get_value(loaded, key)) for key in settings)


def combine(changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All changes in one mapping if they load together; otherwise those of the first half, then of the second."""
    merged = {name: value for settings in changes for name, value in settings.items()}
    are_compatible = all(merged[name] == value for settings in changes for name, value in settings.items())
    if len(changes) == 1 or (are_compatible and not fails(merged)):
        return [merged]
    half = len(changes) // 2
    return combine(changes[:half]) + combine(changes[half:])


def fails(settings: dict[str, Any]) -> bool:
    try:
        load_config(None, settings)
    except ConfigError:
        return True
    return False


def test_null_survives_where_it_is_allowed(tmp_path):
    nullable = [key for key, leaf in known_leaves().items() if type(None) in get_args(leaf.annotation)]
    together: dict[str, None] = {}
    for key in nullable:
        assert get_value(load_config(None, [f"{key}=null"]), key) is None, key
        together |= {} if fails(together | {key: None}) else {key: None}
    loaded = load_config(None, together)
    assert load_config(write(tmp_path, to_yaml(loaded))) == loaded and len(together) > 0.8 * len(nullable)


def test_the_yaml_of_a_full_run_loads_and_survives(tmp_path):
    config = load_config(FULL_RUN)
    assert config.worker.actor.optim.lr == 5e-7 and isinstance(config.worker.actor.optim.lr, float)
    assert config.optimization.divergence_coef == 0.01  # written 1e-2
    assert config.optimization.divergence_horizon == 10000.0
    assert isinstance(config.optimization.divergence_horizon, float)
    assert config.optimization.advantage_estimator == "gae"
    assert config.optimization.divergence_type == "adaptive"
    assert config.optimization.patch_size == "auto"
    assert config.optimization.trajectory_scaling_max is None
    assert config.optimization.token_weight_clip == (0.5, 2.0)
    assert config.training.logger == ("console", "tensorboard", "wandb")
    assert config.worker.rollout.name == "vllm" and config.worker.actor.model.peft_type == "lora"
    assert config.worker.rollout.engine_kwargs == {"enforce_eager": True, "limit_mm_per_prompt": {"image": 2}}
    assert config.worker.reward.weights == (2.5, 1.0, 0.5, 1.0)
    moved, slow = find_warnings(config)
    assert "worker.ref.offload_params with adapters" in moved and "nothing to offload" in moved
    assert "lr = 5e-07 with adapters" in slow
    assert load_config(write(tmp_path, to_yaml(config))) == config


# --- numbers, text, null ---


@pytest.mark.parametrize("written", ["5e-7", "5E-7", "5.0e-7", "0.5e-6", "+5e-7", ".5e-6"])
def test_floats_in_any_spelling_from_file_and_command_line(written, tmp_path):
    path = write(tmp_path, f"worker: {{actor: {{optim: {{lr: {written}}}}}}}")
    assert load_config(path).worker.actor.optim.lr == pytest.approx(5e-7, rel=1e-12)
    assert load_config(None, [f"worker.actor.optim.lr={written}"]).worker.actor.optim.lr == pytest.approx(5e-7)


@pytest.mark.parametrize(
    "override, expected",
    [
        ("worker.rollout.n=true", "a whole number of at least 1 or null, got true"),
        ("worker.rollout.n=4.0", "a whole number of at least 1 or null, got 4.0"),
        ("worker.rollout.n='4'", "a whole number of at least 1 or null, got '4'"),
        ("worker.rollout.n=None", "got 'None'; write null"),
        ("worker.rollout.n=0", "a whole number of at least 1 or null, got 0"),
        ("optimization.gamma=yes", "a number in [0, 1], got true"),
        ("optimization.gamma=high", "a number in [0, 1], got 'high'"),
        ("optimization.gamma=1.01", "a number in [0, 1], got 1.01"),
        ("optimization.gamma=null", "a number in [0, 1], got null"),
        ("optimization.gamma=.nan", "a number in [0, 1], got .nan"),
        ("optimization.top_p_entropy_tokens=0", "a number in (0, 1], got 0"),
        ("worker.actor.optim.lr=.inf", "a number in [0, 1e6], got .inf"),
        ("worker.actor.clip_ratio_low=1.2", "a number in [0, 1], got 1.2"),
        ("worker.actor.clip_ratio_dual=1", "a number above 1 or null, got 1"),
        ("worker.reward.failure_reward=.inf", "a number, got .inf"),
        ("dataset.shuffle=1", "true or false, got 1"),
        ("dataset.shuffle='true'", "true or false, got 'true'"),
        ("optimization.loss_type=ppo", "one of grpo, bnpo, dr_grpo, dapo, got 'ppo'"),
        ("optimization.patch_size=automatic", "a whole number of at least 1 or auto, got 'automatic'"),
        ("optimization.compute_attention_metrics=never", "true or false or auto, got 'never'"),
        ("worker.actor.model.peft_type=dora", "one of lora, qlora or null, got 'dora'"),
        ("training.logger=wandb", "got 'wandb'; write [wandb]"),
        ("training.logger=[console,wandbb]", "file.py:Name, got 'wandbb' (did you mean wandb?)"),
        ("worker.actor.optim.betas=[0.9]", "a list of 2: a number in [0, 1), then a number in [0, 1), got [0.9]"),
        ("worker.actor.optim.betas=[0.9,1.0]", "got [0.9, 1.0]"),
        ("worker.reward.weights=[1,true]", "got [1, True]"),
        ("worker.reward.weight_schedule=[[0.0,1.0]]", "got [[0.0, 1.0]]"),
        ("worker.rollout.engine_kwargs=[1]", "a mapping {name: value}, got [1]"),
        ("dataset.train_files=null", "text, got null"),
    ],
)
def test_wrong_types_and_values_out_of_range(override, expected):
    key = override.split("=")[0]
    assert only_error(override).startswith(f"command line: {key}: expected ")
    assert only_error(override).endswith(expected)


@pytest.mark.parametrize(
    "override, value",
    [
        ("worker.actor.max_grad_norm=.inf", math.inf),  # no clipping
        ("optimization.filter_low=-.inf", -math.inf),  # only the upper bound counts
        ("optimization.gamma=1", 1.0),
        ("optimization.compute_attention_metrics=true", True),
        ("optimization.compute_attention_metrics=auto", "auto"),
        ("training.experiment_name=007", "007"),
        ("training.experiment_name=1e-3", "1e-3"),
        ("training.experiment_name='quoted'", "quoted"),
        ("training.experiment_name=run #3", "run #3"),
        ("dataset.system_prompt=Think: then answer", "Think: then answer"),
        ("dataset.system_prompt=null", None),
        ("dataset.train_files=", ""),
        ("dataset.train_files=a.jsonl,b=c.jsonl", "a.jsonl,b=c.jsonl"),
        ("training.logger=[console,wandb]", ("console", "wandb")),
        ("training.logger=[]", ()),
        ("worker.rollout.engine_kwargs={dtype: half, x: 1e3}", {"dtype": "half", "x": 1000.0}),
        ("worker.rollout.engine_kwargs.a.b=1", {"a": {"b": 1}}),
    ],
)
def test_values_of_the_command_line(override, value):
    kept = get_value(load_config(None, [override]), override.split("=")[0].removesuffix(".a.b"))
    assert (kept, type(kept)) == (value, type(value))


def test_numbers_that_were_meant_as_text_are_errors_in_a_file(tmp_path):
    # YAML reads 2024_01 as 202401; turning that into text would silently rename the run.
    (error,) = get_errors(write(tmp_path, "training:\n  experiment_name: 2024_01\n"))
    assert error.endswith("run.yaml:2: training.experiment_name: expected text, got 202401; put it in quotes")


def test_dates_stay_text(tmp_path):
    path = write(tmp_path, "training: {experiment_name: 2024-01-02}")
    assert load_config(path).training.experiment_name == "2024-01-02"


# --- credit rules: a list of texts and mappings ---


def test_credit_rules_of_a_file_survive_a_save(tmp_path):
    path = write(
        tmp_path,
        "optimization:\n  credit:\n    - entropy_change\n    - rules/mine.py:Surprise\n    - name: entropy_change\n"
        "      power: 5e-1\n      ranges: [[0, 1], [2, 3]]\n      note: a \\${literal}\n",
    )
    config = load_config(path)
    assert config.optimization.credit == (
        "entropy_change",
        "rules/mine.py:Surprise",
        {"name": "entropy_change", "power": 0.5, "ranges": [[0, 1], [2, 3]], "note": "a ${literal}"},
    )
    assert type(config.optimization.credit[2]) is dict
    assert load_config(write(tmp_path, to_yaml(config))) == config


@pytest.mark.parametrize(
    "written, kept",
    [
        ("[]", ()),
        ("[a]", ("a",)),
        ("[a,{name: b, x: 1}]", ("a", {"name": "b", "x": 1})),
        (
            "[mine.py:Rule,{name: mine.py:Rule, x: [1, null]}]",
            ("mine.py:Rule", {"name": "mine.py:Rule", "x": [1, None]}),
        ),
    ],
)
def test_credit_rules_of_the_command_line(written, kept):
    assert load_config(None, [f"optimization.credit={written}"]).optimization.credit == kept


@pytest.mark.parametrize(
    "written, told",
    [
        ("a", "got 'a'; write [a]"),
        ("{name: a}", "got {'name': 'a'}; write [{name: .., ..}]"),
        ("null", "got null"),
        ("3", "got 3; write [3]"),
        ('"a\\nb"', r"got 'a\nb'; write ['a\nb']"),
        ("[a,3]", "got ['a', 3]"),
        ("[[a]]", "got [['a']]"),
    ],
)
def test_invalid_credit_rules(written, told):
    wanted = "expected a list, each text or a mapping {name: value}, "
    assert only_error(f"optimization.credit={written}") == f"command line: optimization.credit: {wanted}{told}"


def test_to_dict_holds_every_key():
    assert list(flat(to_dict(Config()))) == list(known_leaves())


def test_the_configuration_needs_neither_torch_nor_transformers():
    code = "import sys, mtrl.config, mtrl.cli; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
