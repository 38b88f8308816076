"""NoisyRollout: half of each group is sampled on a noised image, and all of it is learnt from on the clean one.

    prompt, noised prompt -> n/2 responses to each -> one group of n responses to the prompt

After sampling nobody sees the noised image: rewards, log-probs, probes, credit and update read the clean one, and the
advantages compare all n responses. So the noise makes the responses to a prompt more different, and the policy learns
which of them are right for the clean image. The log-probs of the sampler are then those of another prompt:
`Rollouts.noised` marks these responses, which have no importance correction (`Rollouts.comparable`).

The noise, for pixels x from 0 to 1 and in step s = 1, 2, .. of S:

    x' = clip(sqrt(abar_t) x + sqrt(1 - abar_t) N(0, 1), 0, 1), stored in 8 bits, rounded down
    abar_t = product over i <= t of (1 - beta_i),  beta_i = 1e-5 + (0.005 - 1e-5) sigmoid(u_i),  i = 0 .. 999
             u_i at equal distances from -6 to 6
    t = int(noise_level * decay(s)),  decay(s) = 1 - 1 / (1 + exp(-c (s - m) / S)),  or 1 with `noise_decay: none`
    c = noise_decay_coef, m = noise_mid_step: decay(m) = 1/2

A prompt has one noised view per step, keyed by (seed, step, task): all of its images are noised, the frames of a clip
by the same noise. A prompt without images is sampled n times as it is. Sample numbers go on from the first half to the
second, so that the first half is that of a run without noise.

Source: the authors' code, NUS-TRAIL/NoisyRollout (arXiv 2504.13055), and the authors' defaults, those of Geometry3K:
level 500, c 30, m 40 of 60 steps, n 12. (MMK12: 450, 60, 40 of 120 steps; the 32 B model: 450, 30, 35, n 8.)

Differences from the authors' code:
- they noise the picture, which the processor then fits to whole patches; here it is noised at the size the model sees;
- random numbers are keyed, not those of the process;
- their other distortions (rotation, cropping) and other schedules (linear, power, exponential) are not here. The
  released settings use neither;
- their runs add an entropy bonus of 0.001, which the paper does not have; `optimization.use_entropy_penalty` is no
  substitute, since it has the other sign;
- their loss is the token mean of a micro-batch of two responses, here that of an optimizer step or any other
  `optimization.loss_type`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from mtrl.algorithms.metrics import Metrics
from mtrl.types import Prompt, Rollouts, Sampling
from mtrl.utils.seeding import rng_for

THREADS = 8  # noise of an image of a megapixel takes 50 ms, and a step has hundreds of them
LEAST_BETA, MOST_BETA, LEVELS = 1e-5, 0.5e-2, 1000


def signal_shares() -> np.ndarray:
    """abar by level: the share of the image in the variance of a noised one, from nearly 1 down to 0.08."""
    beta = LEAST_BETA + (MOST_BETA - LEAST_BETA) / (1 + np.exp(-np.linspace(-6, 6, LEVELS)))
    return np.cumprod(1 - beta)


SIGNAL_SHARES = signal_shares()


@dataclass(frozen=True)
class NoisyRollout:
    """How half of each group is sampled; the fields are keys of `worker.rollout`."""

    total_steps: int
    noise_level: int = 500
    noise_decay: Literal["sigmoid", "none"] = "sigmoid"
    noise_decay_coef: float = 30.0
    noise_mid_step: int = 40
    seed: int = 1

    def level(self, step: int) -> int:
        """t of a step; steps count from 0 here, as everywhere in the loop."""
        if self.noise_decay == "none":
            return self.noise_level
        progress = self.noise_decay_coef * (step + 1 - self.noise_mid_step) / self.total_steps
        # 1 - 1 / (1 + exp(-x)) in a form that cannot overflow.
        return int(self.noise_level * (1 - math.tanh(progress / 2)) / 2)

    def prompts(self, prompts: Sequence[Prompt], step: int) -> list[Prompt]:
        """Each prompt, followed by itself with noised images: one call of the engine samples both."""
        with ThreadPoolExecutor(THREADS) as pool:
            noised = pool.map(lambda prompt: self.noised(prompt, step), prompts)
            return [each for pair in zip(prompts, noised, strict=True) for each in pair]

    def noised(self, prompt: Prompt, step: int) -> Prompt:
        """The prompt as the second half of its group sees it."""
        if not prompt.media:
            return prompt
        random = rng_for("noisy rollout", self.seed, step, prompt.task.id)
        share = SIGNAL_SHARES[self.level(step)]
        return replace(prompt, media=tuple(add_noise(medium, share, random) for medium in prompt.media))

    def sampling(self, sampling: Sampling) -> Sampling:
        """Half the responses to each of twice as many prompts; earlier samples of a step count as two halves each."""
        times = {task: 2 * count for task, count in sampling.times_sampled.items()}
        return replace(sampling, n=sampling.n // 2, times_sampled=times)

    def join(self, prompts: Sequence[Prompt], halves: Rollouts) -> Rollouts:
        """Responses to `self.prompts(prompts)` as groups of the clean prompts, the noised half last."""
        second = halves.group % 2 == 1
        return replace(halves, prompts=tuple(prompts), group=halves.group // 2, noised=second & halves.visual)

    def metrics(self, step: int) -> Metrics:
        return {"rollout/noise_level": float(self.level(step))}


def add_noise(medium: np.ndarray, share: float, random: np.random.Generator) -> np.ndarray:
    """An image [H, W, 3], or a clip [F, H, W, 3] whose frames get the same noise."""
    noise = random.standard_normal(medium.shape[-3:], dtype=np.float32)
    pixels = medium.astype(np.float32) / 255 * np.float32(math.sqrt(share)) + noise * np.float32(math.sqrt(1 - share))
    return (pixels.clip(0, 1) * 255).astype(np.uint8)
