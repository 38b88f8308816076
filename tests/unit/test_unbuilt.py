"""Unsupported settings are rejected, and no key of the configuration is silently ignored."""

import ast
import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

import mtrl
from mtrl.algorithms.advantages import ESTIMATORS
from mtrl.algorithms.credit.registry import RULES
from mtrl.algorithms.losses import POLICY_LOSSES
from mtrl.compose.algorithm import SWITCHES
from mtrl.compose.policy import FORWARD_KEYS
from mtrl.config import Config, ConfigError, find_warnings, load_config
from mtrl.config.tree import known_leaves
from mtrl.config.unsupported import check_supported, find_unsupported
from mtrl.embedded.embedded_rows import CONFIG_FILE
from mtrl.rewards.builtin_names import REWARDS

PACKAGE = Path(mtrl.__file__).parent

REFUSED = {  # text in the message: the overrides
    "worker.rollout.engine_kwargs": {"worker.rollout.engine_kwargs": {"max_num_seqs": 8}},
    "worker.rollout.tensor_parallel_size is not supported with a child process": {
        "worker.rollout.name": "vllm",
        "worker.rollout.mode": "process",
        "worker.rollout.tensor_parallel_size": 2,
        "training.n_gpus_per_node": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("named", REFUSED)
def test_each_switch_alone_is_an_error_that_names_it(named):
    overrides = REFUSED[named]
    config = load_config(None, overrides)
    found = find_unsupported(config)
    assert len(found) == 1
    assert any(named in line and re.search("is not supported with .*; set", line) for line in found)
    with pytest.raises(ConfigError, match="is not supported with"):
        check_supported(config)


def test_every_refusal_is_tried_above():
    """As many conditions as `find_unsupported` has."""
    source = ast.parse((PACKAGE / "config/unsupported.py").read_text())
    switches = next(node for node in ast.walk(source) if isinstance(node, ast.Dict))
    texts = [ast.unparse(switch).strip("f'\"").partition(";")[0].partition("{")[0] for switch in switches.keys]
    said = "\n".join(line for overrides in REFUSED.values() for line in find_unsupported(load_config(None, overrides)))
    for text in texts:
        assert text and text in said, f"no override above switches on: {text}"


def test_all_algorithms_are_supported():
    assert "optimization" not in (PACKAGE / "config/unsupported.py").read_text()


@pytest.mark.parametrize("more", [{}, {"worker.rollout.name": "vllm"}, {"training.n_gpus_per_node": 2}])
def test_all_offloads_together_are_accepted_with_one_line(more):
    """As EasyR1 advises for little memory."""
    keys = ["worker.actor.fsdp.cpu_offload", "worker.actor.offload.offload_params"]
    config = load_config(None, dict.fromkeys([*keys, "worker.actor.offload.offload_optimizer"], True) | more)
    assert find_unsupported(config) == []
    (line,) = [each for each in find_warnings(config) if "offload" in each]
    assert all(key in line for key in keys) and "offload_params changes nothing" in line
    assert not any("offload" in each for each in find_warnings(load_config(None, {keys[1]: True, **more})))


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"training.logger": ()},
        {"training.rollout_log_path": "elsewhere.md", "training.attention_diag_log_path": "elsewhere"},
        {"optimization.compute_attention_metrics": False},
        {"optimization.compute_attention_metrics": True},
        {"optimization.enable_token_weights": True},
        {"worker.reward.functions": ("mdi", "vgr", "vgr_hard_negative")},
        {"worker.rollout.name": "local"},
        {"worker.rollout.name": "vllm", "worker.rollout.engine_kwargs": {"max_num_seqs": 8}},
        {"worker.rollout.name": "vllm", "worker.rollout.mode": "process"},
        {"worker.rollout.name": "vllm", "worker.rollout.mode": "process", "training.n_gpus_per_node": 2},
        {"worker.rollout.name": "vllm", "training.nnodes": 2},
        {
            "worker.rollout.name": "vllm",
            "worker.rollout.mode": "process",
            "worker.hybrid_engine": False,
            "worker.rollout.n_gpus": 1,
        },
        {
            "worker.rollout.name": "vllm",
            "worker.rollout.mode": "server",
            "worker.rollout.address": "localhost:8000",
            "training.n_gpus_per_node": 2,
        },
        {"worker.rollout.name": "mine.py:Engine", "training.n_gpus_per_node": 2},
        {"worker.rollout.name": "mine.py:Engine", "worker.hybrid_engine": False, "worker.rollout.n_gpus": 1},
        {"worker.hybrid_engine": False, "worker.rollout.n_gpus": 2, "worker.rollout.off_policy_steps": 1},
        {"optimization.divergence_penalty": "full"},
        {"optimization.online_filtering": True},
        {"optimization.replay_buffer_size": 64},
        {"worker.reward.functions": ("think_format", "length", "my/file.py:f", "package.module:f")},
        {"worker.reward.reward_fn_path": "file.py"},
        {"worker.reward.reward_fn_path": "file.py", "optimization.enable_token_weights": True},
        {"worker.reward.functions": ("math",)},
        {"worker.reward.reward_type": "model", "worker.reward.model_path": "x"},
        {"worker.reward.reward_type": "model", "worker.reward.model_path": "x", "training.n_gpus_per_node": 2},
        {"worker.actor.model.peft_type": "lora"},
        {"worker.actor.model.peft_type": "qlora", "training.n_gpus_per_node": 2},
        {"worker.actor.fsdp.cpu_offload": True},
        {"worker.actor.fsdp.cpu_offload": True, "training.n_gpus_per_node": 2},
        {"worker.actor.offload.offload_params": True},
        {"worker.actor.offload.offload_params": True, "worker.rollout.name": "vllm"},
        {"worker.actor.offload.offload_params": True, "training.n_gpus_per_node": 2},
        {"worker.actor.offload.offload_params": True, "worker.rollout.name": "vllm", "training.nnodes": 2},
        {"worker.actor.offload.offload_optimizer": True, "worker.ref.offload_params": True, "training.nnodes": 2},
        {"worker.actor.fsdp.param_dtype": "bf16", "worker.actor.fsdp.param_rounding": "kahan", "training.nnodes": 2},
        {"worker.actor.optim.name": "adamw_8bit", "worker.critic.optim.name": "adamw_8bit", "training.nnodes": 2},
        {"optimization.advantage_estimator": "rloo"},
        {"optimization.advantage_estimator": "reinforce_plus_plus"},
        {"optimization.advantage_estimator": "remax"},
        {"optimization.advantage_estimator": "gae"},
        {"optimization.use_divergence_loss": True, "optimization.divergence_penalty": "low_var_kl"},
        {"optimization.use_divergence_loss": True, "optimization.divergence_penalty": "full"},
    ],
)
def test_supported_settings_are_no_error(overrides):
    assert find_unsupported(load_config(None, overrides)) == []


def test_adapters_without_their_library_are_an_error_that_names_the_package(monkeypatch):
    monkeypatch.setattr("mtrl.config.unsupported.find_spec", lambda name: None)
    check_supported(Config())
    with pytest.raises(ConfigError, match=r"peft_type: adapters need the library peft; pip install 'mtrl\[lora\]'"):
        check_supported(load_config(None, {"worker.actor.model.peft_type": "lora"}))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"worker.actor.model.peft_type": "qlora"}, "worker.actor.model.peft_type: qlora"),
        ({"worker.actor.optim.name": "adamw_8bit"}, "worker.actor.optim.name: adamw_8bit"),
        ({"worker.critic.optim.name": "adamw_8bit"}, "worker.critic.optim.name: adamw_8bit"),
    ],
)
def test_settings_that_need_bitsandbytes_name_the_package(overrides, message, monkeypatch):
    monkeypatch.setattr("mtrl.config.unsupported.find_spec", lambda name: None if name == "bitsandbytes" else name)
    how = r"needs the library bitsandbytes; pip install 'mtrl\[qlora\]', or use"
    with pytest.raises(ConfigError, match=f"{message} {how}"):
        check_supported(load_config(None, overrides))
    monkeypatch.setattr("mtrl.config.unsupported.find_spec", lambda name: name)
    check_supported(load_config(None, overrides))


def test_dedicated_engines_need_ray(monkeypatch):
    apart = load_config(None, {"worker.hybrid_engine": False, "worker.rollout.n_gpus": 1})
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(ConfigError, match=r"worker.hybrid_engine: false needs Ray, which starts .* without torchrun"):
        check_supported(apart)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.setattr("mtrl.config.unsupported.find_spec", lambda name: None if name == "ray" else name)
    with pytest.raises(ConfigError, match="several processes need ray"):
        check_supported(apart)
    monkeypatch.setattr("mtrl.config.unsupported.find_spec", lambda name: name)
    check_supported(apart)


def test_defaults_and_the_packaged_config_are_supported():
    assert find_unsupported(Config()) == [] and find_unsupported(load_config(CONFIG_FILE, {})) == []


# ------------------------------------------------------------------------------------------------- nothing is ignored
NO_EFFECT: dict[str, str] = {}


def keys_read(source, roots=("config",)):
    """Dotted keys that a module reads from a configuration: `config.a.b`, `self.config.a.b`, and through aliases,
    `x, y = config.a, config.c` and then `x.b`."""
    found = set()

    def dotted(node, aliases):
        if isinstance(node, ast.Name):
            return aliases.get(node.id)
        if isinstance(node, ast.Attribute):
            if node.attr == "config":
                return ""
            base = dotted(node.value, aliases)
            return None if base is None else f"{base}.{node.attr}".lstrip(".")
        return None

    for function in ast.walk(source):
        if not isinstance(function, ast.FunctionDef):
            continue
        aliases = dict.fromkeys(roots, "")
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                target = node.targets[0]
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=True))
                for name, value in pairs:
                    if isinstance(name, ast.Name) and (key := dotted(value, aliases)) is not None:
                        aliases[name.id] = key
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and (key := dotted(node, aliases)):
                found.add(key)
    return found


@pytest.fixture(scope="module")
def read():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "config":
            found |= keys_read(ast.parse(path.read_text()))
    found |= keys_read(ast.parse((PACKAGE / "config/tree.py").read_text()), roots=("self",))  # the meaning of null
    of_both = keys_read(
        ast.parse((PACKAGE / "compose/algorithm.py").read_text()), roots=("optim",)
    )  # in `make_schedule`
    found |= {f"worker.{learner}.optim.{name}" for learner in ("actor", "critic") for name in of_both}
    found |= {key for reward in REWARDS.values() for key in reward.settings}  # by name, in `builtin_reward`
    built = [*ESTIMATORS.builtin.values(), *POLICY_LOSSES.builtin.values(), *RULES.values(), *filled_from_keys()]
    by_name = {f.name for kind in built for f in fields(kind)} | {*SWITCHES, *FORWARD_KEYS}  # `from_keys`, `make_named`
    return found | {f"{section}.{name}" for section in FILLING for name in by_name}


FILLING = (  # sections whose keys fill the fields of components
    "optimization", "dataset", "training", "worker.actor", "worker.actor.model", "worker.actor.fsdp",
    "worker.actor.optim", "worker.critic.optim", "worker.rollout", "worker.rollout.val",
)  # fmt: skip


def filled_from_keys():
    """The classes in calls of `from_keys(Class, sections)`."""
    for path in (PACKAGE / "compose").glob("*.py"):
        module = import_module(f"mtrl.compose.{path.stem}")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("from_keys"):
                yield getattr(module, ast.unparse(node.args[0]))


def test_the_reader_of_sources():
    source = "def f(config):\n  a, b = config.x, config.y.z\n  c = a.u\n  return b.v + c.w + other.q + run.config.k.m"
    assert {"x", "y.z", "x.u", "y.z.v", "x.u.w", "k.m"} <= keys_read(ast.parse(source))
    assert not any("q" in key for key in keys_read(ast.parse(source)))


def test_every_key_is_read_or_listed_with_a_reason(read):
    ignored = [key for key in known_leaves() if key not in read and key not in NO_EFFECT]
    assert not ignored, f"nobody reads {', '.join(ignored)}"


def test_the_list_is_not_longer_than_it_must_be(read):
    built = [key for key in NO_EFFECT if key in read or key not in known_leaves()]
    assert not built, f"these have an effect by now: {', '.join(built)}"
