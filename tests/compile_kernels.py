"""Compiles every kernel that decoding launches to machine code of a GPU, without a GPU: python compile_kernels.py

A batch is decoded on the CPU with the kernels' own launching functions, so that each kernel gets the types and the
constants that a run gives it; instead of running, it is compiled for sm_90. What is decoded has no meaning. The last
line is JSON: the names of the kernels, each with the number of its compiled variants.
"""

import json
import os
import sys
from collections import Counter

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported

import torch
from decode_helpers import engine, stopping_encoder
from tiny_models import fresh_backbone, prompts_for
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from mtrl.models.backbone import Backbone
from mtrl.rollout.decode.step import triton_ops
from mtrl.types import Sampling

SAMPLINGS = {"plain": {}, "greedy": {"temperature": 0.0}, "cut": {"top_k": 5, "top_p": 0.9}}


class Compiler:
    """The driver of a GPU that is not there."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


COMPILED = Counter()


def compile_instead(kernel, grid):
    def launch(*arguments, **options):
        before = sum(len(cache[0]) for cache in kernel.device_caches.values())
        made = kernel.warmup(*arguments, grid=grid, **options)
        assert "cubin" in made.asm, "machine code"
        COMPILED[kernel.fn.__name__] += sum(len(cache[0]) for cache in kernel.device_caches.values()) - before

    return launch


def main(families):
    driver.set_active(Compiler())
    JITFunction.__getitem__ = compile_instead
    for family in families:
        for dtype in (torch.bfloat16, torch.float32):
            backbone = Backbone(fresh_backbone(family).model, dtype)
            decode = engine(backbone, stopping_encoder(family), triton_ops())
            for options in SAMPLINGS.values():
                decode.generate(prompts_for(family)[:2], Sampling(n=2, max_new_tokens=2, **options))
    print(json.dumps(COMPILED))


if __name__ == "__main__":
    main(sys.argv[1:])
