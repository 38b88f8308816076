"""What is measured: the sizes of a step, and the settings of the run that has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrl.bench.random_run import PATHS, step_settings, write_run
from mtrl.bench.shapes import SHAPES, Shape
from mtrl.config import read_overrides

DTYPES = ("fp32", "bf16")
DTYPE_KEY = "worker.actor.fsdp.param_dtype"
TPRL = {"optimization.enable_perception_filtering": True, "optimization.enable_trajectory_reweighting": True}


def count_tokens(prompts: int, generations: int, prompt_len: int, completion: int) -> tuple[int, int]:
    """Tokens of a step with every prompt counted once per group, as it is computed where prompts are shared, and once
    per response, as most frameworks count.

    >>> count_tokens(8, 8, 642, 256)
    (21520, 57472)
    """
    responses = prompts * generations
    return prompts * prompt_len + responses * completion, responses * (prompt_len + completion)


@dataclass(frozen=True)
class Workload:
    """The names are those of the results: all responses have `completion` tokens, and the pictures are squares."""

    size: str = "tiny"
    prompts: int = 2
    generations: int = 4
    image_side: int = 56
    completion: int = 16
    steps: int = 4
    device: str = "cpu"
    dtype: str = "fp32"  # of the master weights
    text_tokens: int = 64  # of a prompt, besides those of its picture
    seed: int = 0
    tprl: bool = False
    attention: bool = False
    stored: bool = False  # the weights are written to disk, and the run reads them
    overrides: Sequence[str] = ()

    @property
    def shape(self) -> Shape:
        return SHAPES[self.size]

    @property
    def image_tokens(self) -> int:
        return self.shape.image_tokens(self.image_side)

    @property
    def responses(self) -> int:
        return self.prompts * self.generations

    def make_settings(self) -> dict[str, Any]:
        """Settings of the YAML; the rest are the defaults of `mtrl train`."""
        prompt_tokens = self.text_tokens + self.image_tokens
        settings = step_settings(
            self.prompts, self.generations, self.completion, self.steps, [self.image_side], prompt_tokens
        )
        if self.dtype != "fp32":
            settings[DTYPE_KEY] = self.dtype
        if self.attention:
            settings["optimization.compute_attention_metrics"] = True
        return settings | (TPRL if self.tprl else {})

    def reported_settings(self) -> dict[str, Any]:
        """All that differs from the defaults, without the paths."""
        settings = self.make_settings() | read_overrides(self.overrides)
        return {key: value for key, value in settings.items() if key not in PATHS}

    def write(self, folder: Path) -> Path:
        """Write the inputs of the run; returns the path of its YAML."""
        return write_run(
            folder, self.size, self.device, self.prompts * (self.steps + 1), [self.image_side], self.text_tokens,
            self.seed, self.make_settings(), weights=self.stored,
        )  # fmt: skip
