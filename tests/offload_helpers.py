"""Weights that are really moved on a CPU, and whose old memory is overwritten: whoever still reads it gets NaN."""

import math

from mtrl.models.parallel.fsdp import weight_memory
from mtrl.workers.offload import OffloadedWeights


class PoisonedWeights(OffloadedWeights):
    """`moves`: where they went, in order."""

    def __init__(self, model):
        super().__init__(model)
        self.moves = []

    def _move(self, move):
        old = [tensor.detach().view(tensor.shape) for tensor in weight_memory(self.model)]
        super()._move(move)
        for before, after in zip(old, weight_memory(self.model), strict=True):
            assert before.numel() == 0 or before.data_ptr() != after.data_ptr()
            if before.is_floating_point():
                before.fill_(math.nan)
        self.moves.append("off" if self.is_offloaded else "on")
