"""VEPO (arXiv 2606.03937), by the authors' code (Leonnnnnn929/VEPO, jsd_masking.py, score D): only tokens that depend
on the image where the model was uncertain are trained.

P is the distribution of a token, Q the one under a noised image, H the entropies of both, all before the updates of a
step. j, d and h are scaled to 0 .. 1 by their lowest and highest value in the response, with a range of at least 1e-8:

    j_t = JSD(P, Q) in nats      d_t = |H(Q) - H(P)|      h_t = H(P)
    s_t = (1 - (1 - j_t)^a (1 - d_t)^(1 - a)) h_t
    the ceil(top_p n) tokens of a response with the highest s count, and the loss is divided by those

Defaults are those of its run_train.sh: top_p 0.2, a 0.7, noise with a standard deviation of 2 on normalized pixels. In
the authors' runs the noise is added once for each of the 12 responses to a prompt, which makes it 6.9: `noise: 6.9`.

Differences from the code: JSD has no 1e-8 inside its logarithm; of equal s the earlier tokens count; the loss is
divided by the tokens of the optimizer step, not of a micro-batch; a response without an image trains all its tokens
(there: some); an entropy penalty and the divergence, if they are on, are over the tokens that count (there: over all).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mtrl.algorithms.credit.rule import Key, Weight
from mtrl.algorithms.groups import row_min_max, top_fraction
from mtrl.types import Experience, Needs

LEAST_RANGE = 1e-8


@dataclass(frozen=True)
class Vepo(Weight):
    """[N, T] of 0 and 1: what a token counts for in all sums and denominators."""

    top_p: float = 0.2
    a: float = 0.7
    noise: float = 2.0
    target = "mask"

    @property
    def needs(self) -> Needs:
        return Needs("entropy", f"jsd@{self.view}", f"entropy@{self.view}")

    @property
    def view(self) -> str:
        return f"noised({self.noise:g})"

    def apply(self, experience: Experience, key: Key) -> Tensor:
        signals, rollouts = experience.signals, experience.rollouts
        assert signals.entropy is not None, "the probe did not measure the signal that the rule needs"
        change = (signals.extra[f"entropy@{self.view}"] - signals.entropy).abs()
        jsd, change, entropy = (
            row_min_max(each, rollouts.mask, least=LEAST_RANGE)
            for each in (signals.extra[f"jsd@{self.view}"], change, signals.entropy)
        )
        score = (1 - (1 - jsd) ** self.a * (1 - change) ** (1 - self.a)) * entropy
        return (top_fraction(score, rollouts.mask, self.top_p) | ~rollouts.visual[:, None]).float()
