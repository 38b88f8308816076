"""The built-in rewards by name. The configuration reads this too, so it imports nothing: what a name means is text.

A new one is a function in a file of this folder and a line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Library(NamedTuple):
    module: str
    install: str  # the command that installs the module


class BuiltinReward(NamedTuple):
    """`place` names a function of a sample, or, where there are `settings`, a function that makes one (or a whole
    `RewardFunction`) from the values of these keys of the configuration."""

    place: str  # package.module:name
    settings: tuple[str, ...] = ()
    truth: bool = False  # compares with the row's answer, and says nothing without one
    attention: bool = False  # reads where the response looked
    sandboxed: bool = False  # runs as a user's function does: a hostile answer can make it think for hours
    library: Library | None = None  # the library that it cannot do without


COMPUTE_DTYPE = "worker.actor.fsdp.mixed_precision_dtype"

REWARDS: Mapping[str, BuiltinReward] = {
    "accuracy": BuiltinReward("mtrl.rewards.builtin:accuracy", truth=True),
    "math": BuiltinReward(
        "mtrl.rewards.math_equality:math",
        truth=True,
        sandboxed=True,
        library=Library("math_verify", "pip install 'mtrl[math]'"),
    ),
    "format": BuiltinReward("mtrl.rewards.builtin:format"),
    "think_format": BuiltinReward("mtrl.rewards.builtin:think_format"),
    "length": BuiltinReward(
        "mtrl.rewards.builtin:length", ("dataset.max_response_length", "worker.reward.soft_punish_cache")
    ),
    "mdi": BuiltinReward("mtrl.rewards.grounding:mdi", ("worker.reward.mdi_balance_ratio",), attention=True),
    "vgr": BuiltinReward("mtrl.rewards.grounding:vgr", ("worker.reward.vgr_normalizer", COMPUTE_DTYPE), attention=True),
    "vgr_hard_negative": BuiltinReward(
        "mtrl.rewards.grounding:vgr_hard_negative",
        ("worker.reward.vgr_normalizer", "worker.reward.vgr_hard_negative_pool", COMPUTE_DTYPE),
        attention=True,
    ),
}


def is_bare(name: str) -> bool:
    """A built-in's name, known or not, rather than a path to a function: file.py[:name] or package.module:name."""
    return not any(sign in name for sign in "./:\\")
