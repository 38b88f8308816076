"""Engines as a user writes them."""

from dataclasses import dataclass
from typing import Any

import mtrl
from mtrl.rollout.local import LocalGenerator


@dataclass
class Samples(mtrl.Engine):
    """With `policy`, whose weights are always those of the loaded version: there is nothing else to load."""

    policy: Any
    encoder: Any

    def __post_init__(self):
        self.local = LocalGenerator(self.policy.backbone, self.encoder)

    def load(self, weights):
        self.local.version = weights.version

    def generate(self, prompts, sampling):
        return self.local.generate(prompts, sampling)


@dataclass
class Reads(mtrl.Engine):
    """Has no model, and reads a single weight."""

    encoder: Any

    def load(self, weights):
        name = next(iter(weights.tensors))
        self.seen = weights.version, float(weights.tensors[name].sum())
