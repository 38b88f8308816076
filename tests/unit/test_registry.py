"""Credit rules by name: those of the package, a user's own, and one clear line for anything else."""

import sys

import pytest
import torch
from helpers import fake_experience, fake_rollouts

from mtrl.algorithms.credit import assign
from mtrl.algorithms.credit.attention_weights import AttentionWeights
from mtrl.algorithms.credit.entropy_filter import EntropyFilter
from mtrl.algorithms.credit.registry import RULES, make_rule
from mtrl.algorithms.credit.rule import Rule
from mtrl.algorithms.credit.trajectory_scaling import TrajectoryScaling
from mtrl.types import Needs
from mtrl.utils.plugins import PluginError

MINE = '''
from dataclasses import dataclass

import torch

from mtrl.algorithms.credit import Weight
from mtrl.types import Needs


@dataclass(frozen=True)
class Late(Weight):
    """Later tokens get more."""

    slope: float
    places: tuple = ()
    needs = Needs("entropy")

    def apply(self, experience, key):
        place = torch.arange(experience.rollouts.mask.shape[1])
        return (1 + self.slope * place).expand(experience.rollouts.mask.shape)


class Undecorated(Weight):
    def apply(self, experience, key):
        return None


@dataclass(frozen=True)
class Unfinished(Weight):
    pass


@dataclass
class Stranger:
    slope: float = 1.0


def late(experience, key):
    return None
'''


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    """Loaded files add their folders to sys.path; this removes them for later tests."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "my_rule.py"
    path.write_text(MINE)
    return str(path)


def refusal(spec):
    with pytest.raises(PluginError) as refused:
        make_rule(spec)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# -------------------------------------------------------------------------------------------------------- what is found
@pytest.mark.parametrize("name", sorted(RULES.keys() - {"shuffled"}))  # which wants another one to wrap
def test_every_name_makes_its_rule(name):
    rule = make_rule(name)
    assert type(rule) is RULES[name] and isinstance(rule, Rule) and isinstance(rule.needs, Needs)
    assert make_rule({"name": name}) == rule


def test_arguments_are_the_fields_and_lists_become_tuples():
    assert make_rule({"name": "entropy_filter", "top_p": 0.5}) == EntropyFilter(0.5)
    assert make_rule({"name": "trajectory_scaling", "low": 0.9, "high": None}) == TrajectoryScaling(0.9, None)
    spec = {"name": "attention_weights", "clip": [0.5, 2.0], "target": "mask"}
    assert make_rule(spec) == AttentionWeights(token_weight_target="mask", token_weight_clip=(0.5, 2.0))
    assert spec == {"name": "attention_weights", "clip": [0.5, 2.0], "target": "mask"}, "the configuration stays"


def test_a_rule_of_a_module():
    assert make_rule("mtrl.algorithms.credit.entropy_filter:EntropyFilter") == EntropyFilter()


def test_a_rule_of_a_file_takes_part(mine):
    rule = make_rule({"name": f"{mine}:Late", "slope": 0.5, "places": [1, 2]})
    assert rule.places == (1, 2) and rule.needs == Needs("entropy")
    experience = fake_experience(fake_rollouts([3]), advantage=torch.full((1, 3), 2.0))
    assert assign([rule], experience, (0, 0)).advantage.tolist() == [[2.0, 3.0, 4.0]]


# ------------------------------------------------------------------------------------------------------ what is refused
def test_an_unknown_name_is_reported_with_the_known_ones():
    message = refusal("entropy_filtr")
    assert message.startswith("there is no credit rule entropy_filtr (did you mean entropy_filter?); there are ")
    assert all(name in message for name in RULES) and "file.py:Name" in message
    assert "did you mean" not in refusal("xyz")


def test_a_file_without_its_rule_is_no_name(mine):
    assert refusal(mine).startswith(f"there is no credit rule {mine}")


def test_arguments_that_it_does_not_take(mine):
    message = refusal({"name": "entropy_filter", "top": 0.5, "p": 1})
    assert message == "entropy_filter takes no p, top; its arguments are top_p_entropy_tokens"
    assert refusal({"name": f"{mine}:Late", "slop": 1}) == f"{mine}:Late takes no slop; its arguments are slope, places"
    assert "takes no needs" in refusal({"name": "entropy_filter", "needs": []})


def test_an_argument_that_is_missing(mine):
    message = refusal(f"{mine}:Late")
    assert message.startswith(f"{mine}:Late: ") and "missing" in message and "'slope'" in message


@pytest.mark.parametrize("spec", [{}, {"top_p": 0.5}, {"name": None}, {"name": 3}])
def test_a_mapping_without_a_name(spec):
    assert refusal(spec) == f"{spec}: the name of the credit rule is missing; write {{name: .., and its arguments}}"


def test_files_and_names_that_do_not_exist(mine, tmp_path):
    assert refusal(f"{tmp_path}/none.py:Late") == f"there is no credit rule file {tmp_path}/none.py"
    message = refusal(f"{mine}:Early")
    assert message.startswith(f"{mine} has no credit rule Early; it has ") and "Late" in message
    assert "No module named 'no_such_module'" in refusal("no_such_module:Late")
    assert refusal(f"{tmp_path}/rule:Late").startswith(f"{tmp_path}/rule is no Python file")


@pytest.mark.parametrize("name", ["late", "Stranger", "Undecorated", "torch"])
def test_objects_that_are_no_rules(mine, name):
    wanted = "it must be a frozen dataclass and a Filter, a Weight or a Bonus"
    assert refusal(f"{mine}:{name}") == f"{mine}:{name} is no credit rule: {wanted}"


def test_a_rule_that_does_not_apply(mine):
    assert "abstract" in refusal(f"{mine}:Unfinished") and "apply" in refusal(f"{mine}:Unfinished")


def test_a_file_that_cannot_be_run(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("x = 1 / 0\n")
    assert refusal(f"{path}:Late") == f"{path}:Late cannot be loaded: ZeroDivisionError: division by zero (broken.py:1)"


READ = {
    "attention_anchors": ["attention_mass"], "attention_weights": ["attention_mass"], "bottom": ["dependency"],
    "entropy_change": ["entropy_change"], "entropy_filter": ["entropy"], "hidden_similarity": ["similarity"],
    "dyco": ["image_share", "image_shift", "text_share", "text_shift"],
    "key_tokens": [], "ktae": [], "pepo": ["entropy", "layer_similarity"], "pgpo": ["logprobs@none", "old_logprobs"],
    "vgpo": ["token_similarity"], "vepo": ["entropy", "entropy@noised(2)", "jsd@noised(2)"],
    "mass_gate": ["dependency"], "oracle": [],
    "perception_bonus": ["old_logprobs", "perturbed_logprobs"], "perception_filter": ["dependency"],
    "random_filter": [], "trajectory_scaling": ["dependency"], "vision_entropy": ["dependency", "entropy"],
    "vision_entropy_weights": ["dependency", "entropy"],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(READ))
def test_what_each_rule_reads(name):
    assert sorted(make_rule(name).needs.names) == READ[name]


def test_every_rule_is_in_that_table():
    assert READ.keys() == RULES.keys() - {"shuffled"}


def test_arguments_by_their_former_names():
    former = {"target": "mask", "clip": [0.5, 2.0], "smooth_sigma": 1.5, "top_ratio": 0.6, "attention": False}
    assert make_rule({"name": "attention_weights", **former}) == AttentionWeights("mask", (0.5, 2.0), 1.5, 0.6, False)
