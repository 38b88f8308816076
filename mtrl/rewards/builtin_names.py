"""The built-in rewards by name. The configuration reads this too, so it imports nothing; functions are named by text.

To add one, write a function in this package and add a line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Library(NamedTuple):
    module: str
    install: str  # the command that installs the module


class BuiltinReward(NamedTuple):
    """`function` takes a sample; with `settings`, it takes the values of these configuration keys and returns such a
    function (or a `RewardFunction`)."""

    function: str  # package.module:name
    settings: tuple[str, ...] = ()
    truth: bool = False  # compares with the row's answer, and does not apply without one
    attention: bool = False  # needs the attention mass of the response
    sandboxed: bool = False  # runs like a user function: a hostile answer can take it hours
    library: Library | None = None  # required library


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


def is_builtin_name(name: str) -> bool:
    """Whether this is a built-in's name, known or not, and not a path: file.py[:name] or package.module:name."""
    return not any(sign in name for sign in "./:\\")
