"""Everything that users add: by name, with arguments, from a file; and objects that travel between processes."""

import pickle
import subprocess
import sys
import threading

import pytest
import torch

from mtrl.algorithms.advantages import ESTIMATORS, Gae, Grpo
from mtrl.algorithms.credit.registry import RULES
from mtrl.algorithms.losses import POLICY_LOSSES, Ppo
from mtrl.compose.algorithm import make_algorithm, make_estimator, make_policy_loss
from mtrl.compose.run import build
from mtrl.config import ConfigError, load_config
from mtrl.config.tree import known_leaves
from mtrl.embedded.embedded_rows import CONFIG_FILE
from mtrl.utils.plugins import PluginError

ESTIMATOR = '''
from dataclasses import dataclass

from mtrl.algorithms.advantages import Estimator, to_tokens
from mtrl.types import Needs


@dataclass(frozen=True)
class Signed(Estimator):
    """The sign of the reward, discounted."""

    gamma: float = 1.0
    strength: float = 1.0
    needs = Needs("entropy")
    needs_baseline = True

    def estimate(self, experience, penalty):
        sign = experience.rewards.total.sign() * self.strength * self.gamma
        return to_tokens(sign, experience.rollouts.mask), None
'''
LOSS = '''
from dataclasses import dataclass

from mtrl.algorithms.losses import PolicyLoss


@dataclass(frozen=True)
class Reinforce(PolicyLoss):
    """-A log p, without a ratio."""

    scale: float = 1.0

    def term(self, ratio, logp, advantage):
        return -self.scale * advantage * logp
'''


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def test_names_of_keys_are_those_of_the_registries():
    leaves = known_leaves()
    assert set(leaves["optimization.advantage_estimator"].names) == set(ESTIMATORS.builtin)
    assert set(leaves["optimization.policy_loss"].names) == set(POLICY_LOSSES.builtin)
    assert RULES


def test_arguments_come_from_the_keys_and_then_from_the_entry(write):
    config = load_config(overrides={"optimization.advantage_estimator": "gae", "optimization.lam": 0.5})
    assert make_estimator(config) == Gae(gamma=1.0, lam=0.5)
    config = load_config(overrides={"optimization.advantage_estimator": {"name": "gae", "gamma": 0.9}})
    assert make_estimator(config) == Gae(gamma=0.9, lam=0.95) and config.rollouts_per_prompt == 1
    config = load_config(overrides={"optimization.policy_loss": {"name": "ppo", "clip_ratio_high": 0.9}})
    assert make_policy_loss(config) == Ppo(clip_ratio_high=0.9)


def test_an_estimator_of_a_file_declares_what_it_needs(write):
    file = write("mine.py", ESTIMATOR)
    yaml = write("run.yaml", "optimization: {gamma: 0.5, advantage_estimator: {name: 'mine.py:Signed', strength: 3}}")
    config = load_config(yaml)
    assert config.optimization.advantage_estimator["name"] == f"{file}:Signed", "relative to the YAML"
    spec = make_algorithm(config, 1)
    assert (spec.estimator.gamma, spec.estimator.strength) == (0.5, 3) and config.rollouts_per_prompt == 8
    assert spec.greedy_baseline and "entropy" in spec.needs and "values" not in spec.needs


@pytest.mark.slow  # 3 s
def test_a_policy_loss_of_a_file_travels_to_another_process(write, tmp_path):
    file = write("mine.py", LOSS)
    config = load_config(overrides={"optimization.policy_loss": {"name": f"{file}:Reinforce", "scale": 2.0}})
    loss = make_policy_loss(config)
    logp = torch.tensor([[-1.0]])
    assert loss.term(torch.ones(1, 1), logp, torch.ones(1, 1)).item() == 2
    again = pickle.loads(pickle.dumps(loss))
    assert (type(again).__name__, again.scale, again.clip_ratio_low) == ("Reinforce", 2.0, 0.2)
    assert type(pickle.loads(pickle.dumps(again))) is type(again), "the file is not run again for each object"
    (tmp_path / "loss.pkl").write_bytes(pickle.dumps(loss))
    code = "import pickle, sys; loss = pickle.load(open(sys.argv[1], 'rb')); print(loss.scale, loss.level)"
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path / "loss.pkl")], capture_output=True, text=True)
    assert run.stdout.split() == ["2.0", "token"], run.stderr


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("advantage_estimator", "grpoo", "expected one of gae, grpo, .*file.py:Name, got 'grpoo' .did you mean grpo"),
        ("policy_loss", {"name": "pppo"}, "did you mean ppo"),
        ("policy_loss", {"clip": 1}, "expected {name: .., and its arguments}"),
        ("policy_loss", 3, "policy_loss: expected"),
    ],
)
def test_a_wrong_name_is_an_error_of_the_configuration(key, value, message):
    with pytest.raises(ConfigError, match=message):
        load_config(overrides={f"optimization.{key}": value})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "grpo", "scale": 1}, "grpo takes no scale; its arguments are scale_rewards"),
        ({"name": "gae", "lam": "much"}, "gae: lam: expected a number, got 'much'"),
    ],
)
def test_wrong_arguments_name_the_key(spec, message):
    config = load_config(overrides={"optimization.advantage_estimator": spec})
    with pytest.raises(ConfigError, match=f"optimization.advantage_estimator: {message}"):
        make_estimator(config)


def test_errors_of_a_users_file_name_its_line(write):
    broken = write("broken.py", "from dataclasses import dataclass\n\nx = 1 / 0\n")
    with pytest.raises(PluginError, match=r"ZeroDivisionError: division by zero \(broken.py:3\)"):
        ESTIMATORS.make(f"{broken}:X")
    loss = write("loss.py", LOSS)
    with pytest.raises(PluginError, match="is no advantage estimator: it must be a frozen dataclass and a Estimator"):
        ESTIMATORS.make(f"{loss}:Reinforce")


def test_a_built_in_one_is_its_class():
    assert ESTIMATORS.make("grpo") == Grpo()
    assert POLICY_LOSSES.make("gspo").level == "sequence"
    with pytest.raises(PluginError, match="there is no policy loss reinforce; there are ppo"):
        POLICY_LOSSES.make("reinforce")


def test_a_logger_that_cannot_be_made_leaves_nothing_behind(tmp_path, monkeypatch):
    """No thread, no lock on the run directory, and an error that names the line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(BROKEN_LOGGER)
    overrides = ["training.logger=[console, mine.py:Broken]", f"training.output_dir={tmp_path}"]
    before = set(threading.enumerate())
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"training.logger: mine.py:Broken: RuntimeError: no network \(mine.py:8\)"
        ):
            build(load_config(CONFIG_FILE, overrides))
    assert [thread.name for thread in threading.enumerate() if thread not in before] == []


BROKEN_LOGGER = """from dataclasses import dataclass

import mtrl

@dataclass
class Broken(mtrl.Callback):
    def __post_init__(self):
        raise RuntimeError("no network")
"""
