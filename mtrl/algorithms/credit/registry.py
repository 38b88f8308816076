"""Credit rules by name. A built-in rule has one line here; a user's rule is `file.py:Name` or `module:Name`."""

from __future__ import annotations

from mtrl.algorithms.credit.attention_anchors import AttentionAnchors
from mtrl.algorithms.credit.attention_weights import AttentionWeights
from mtrl.algorithms.credit.controls import Bottom, RandomFilter
from mtrl.algorithms.credit.dyco import Dyco
from mtrl.algorithms.credit.entropy_change import EntropyChange
from mtrl.algorithms.credit.entropy_filter import EntropyFilter
from mtrl.algorithms.credit.hidden_similarity import HiddenSimilarity
from mtrl.algorithms.credit.key_tokens import KeyTokens
from mtrl.algorithms.credit.ktae import Ktae
from mtrl.algorithms.credit.mass_gate import MassGate
from mtrl.algorithms.credit.oracle import Oracle
from mtrl.algorithms.credit.pepo import Pepo
from mtrl.algorithms.credit.perception_bonus import PerceptionBonus
from mtrl.algorithms.credit.perception_filter import PerceptionFilter
from mtrl.algorithms.credit.pgpo import Pgpo
from mtrl.algorithms.credit.rule import Bonus, Filter, Rule, Weight
from mtrl.algorithms.credit.shuffled import Shuffled, shuffled
from mtrl.algorithms.credit.trajectory_scaling import TrajectoryScaling
from mtrl.algorithms.credit.vepo import Vepo
from mtrl.algorithms.credit.vgpo import Vgpo
from mtrl.algorithms.credit.vision_entropy import VisionEntropy, VisionEntropyWeights
from mtrl.utils.plugin_registry import Registry, Spec, spec_name
from mtrl.utils.plugins import PluginError

RULES: dict[str, type[Rule]] = {
    "perception_filter": PerceptionFilter,
    "entropy_filter": EntropyFilter,
    "trajectory_scaling": TrajectoryScaling,
    "attention_weights": AttentionWeights,
    "entropy_change": EntropyChange,
    "pgpo": Pgpo,
    "vepo": Vepo,
    "vgpo": Vgpo,
    "pepo": Pepo,
    "dyco": Dyco,
    "ktae": Ktae,
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


REGISTRY = Registry[Rule]("credit rule", (Filter, Weight, Bonus), RULES)


def make_rule(spec: Spec) -> Rule:
    """Make a rule from `name`, `file.py:Name` or {name: .., and its arguments}; PluginError says what is wrong."""
    if spec_name(spec) != "shuffled" or isinstance(spec, str) or "rule" not in spec:
        return REGISTRY.make(spec)
    inner = make_rule(spec["rule"])
    if not inner.needs:
        raise PluginError(f"shuffled: {inner} reads no signal, so there is nothing to shuffle")
    made = REGISTRY.make({**spec, "rule": inner})
    assert isinstance(made, Shuffled)
    return shuffled(made.rule, made.across)
