"""Credit rules by name. A built-in rule has one line here; a user's rule is `file.py:Name` or `module:Name`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from mtrl.algorithms.credit.attention_anchors import AttentionAnchors
from mtrl.algorithms.credit.attention_weights import AttentionWeights
from mtrl.algorithms.credit.controls import Bottom, RandomFilter
from mtrl.algorithms.credit.entropy_change import EntropyChange
from mtrl.algorithms.credit.entropy_filter import EntropyFilter
from mtrl.algorithms.credit.hidden_similarity import HiddenSimilarity
from mtrl.algorithms.credit.key_tokens import KeyTokens
from mtrl.algorithms.credit.mass_gate import MassGate
from mtrl.algorithms.credit.oracle import Oracle
from mtrl.algorithms.credit.perception_bonus import PerceptionBonus
from mtrl.algorithms.credit.perception_filter import PerceptionFilter
from mtrl.algorithms.credit.rule import Rule
from mtrl.algorithms.credit.shuffled import Shuffled, shuffled
from mtrl.algorithms.credit.trajectory_scaling import TrajectoryScaling
from mtrl.algorithms.credit.user_rules import load_rule
from mtrl.algorithms.credit.vision_entropy import VisionEntropy, VisionEntropyWeights
from mtrl.utils.plugins import PluginError

RULES: dict[str, type[Rule]] = {
    "perception_filter": PerceptionFilter,
    "entropy_filter": EntropyFilter,
    "trajectory_scaling": TrajectoryScaling,
    "attention_weights": AttentionWeights,
    "entropy_change": EntropyChange,
    "mass_gate": MassGate,
    "vision_entropy": VisionEntropy,
    "vision_entropy_weights": VisionEntropyWeights,
    "hidden_similarity": HiddenSimilarity,
    "attention_anchors": AttentionAnchors,
    "key_tokens": KeyTokens,
    "perception_bonus": PerceptionBonus,
    "random_filter": RandomFilter,
    "bottom": Bottom,
    "shuffled": Shuffled,
    "oracle": Oracle,
}


def make_rule(spec: str | Mapping[str, Any]) -> Rule:
    """Make a rule from `name`, `file.py:Name` or {name: .., and its arguments}; PluginError says what is wrong."""
    arguments = {} if isinstance(spec, str) else dict(spec)
    name = spec if isinstance(spec, str) else arguments.pop("name", None)
    if not isinstance(name, str):
        raise PluginError(f"{spec}: the name of the rule is missing; write {{name: .., and its arguments}}")
    kind: Any = RULES.get(name) or find_class(name)
    parameters = [f.name for f in fields(kind) if f.init]
    if unknown := sorted(arguments.keys() - set(parameters)):
        raise PluginError(f"{name} takes no {', '.join(unknown)}; its arguments are {', '.join(parameters) or 'none'}")
    values: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in arguments.items()}
    if kind is Shuffled and "rule" in values:
        values["rule"] = make_rule(values["rule"])
        if not values["rule"].needs:
            raise PluginError(f"{name}: {values['rule']} reads no signal, so there is nothing to shuffle")
    try:
        rule: Rule = kind(**values)
    except TypeError as error:  # an argument without a default is missing
        raise PluginError(f"{name}: {error}") from error
    return shuffled(rule.rule, rule.across) if isinstance(rule, Shuffled) else rule


def find_class(name: str) -> Any:
    """Find the class of a user's rule, from `file.py:Name` or `module:Name`."""
    if ":" not in name:
        close = get_close_matches(name, RULES, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise PluginError(f"there is no rule {name}{hint}; there are {', '.join(RULES)}; your own is file.py:Name")
    return load_rule(name)
