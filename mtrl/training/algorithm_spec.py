"""The algorithm as values. `compose/algorithm.py` reads them from the config; the loop never looks at the config."""

from __future__ import annotations

from dataclasses import dataclass

from mtrl.algorithms.advantages import Estimator
from mtrl.algorithms.batches import BatchPlan
from mtrl.algorithms.credit import Rule
from mtrl.algorithms.divergence import Divergence
from mtrl.algorithms.losses import Loss
from mtrl.algorithms.replay import ReplayRule
from mtrl.algorithms.value_loss import ValueLoss
from mtrl.training.dynamic_sampling import Filtering
from mtrl.training.noisy_rollout import NoisyRollout
from mtrl.types import Needs, Sampling

NOTHING = Needs()
NO_CRITIC = ValueLoss()


@dataclass(frozen=True)
class AlgorithmSpec:
    total_steps: int
    prompts_per_step: int
    sampling: Sampling
    needs: Needs  # signals of every step: all that rules, rewards, divergence and trackers read
    attention_every: int  # read attention for metrics every so many steps; 0: only if it is needed
    estimator: Estimator
    divergence: Divergence | None
    credit: tuple[Rule, ...]
    loss: Loss
    batches: BatchPlan
    val_freq: int  # steps between validations; -1: only at the end
    validate_first: bool
    save_freq: int  # steps between checkpoints; -1: only at the end
    save_minutes: float | None = None  # also save after so many minutes, unless save_freq is -1
    seed: int = 0  # for the order of minibatches, for replay, and for credit rules that draw random numbers
    sync_ref_every: int = 0  # steps between syncs of the reference with the policy; 0: never
    reward_needs: Needs = NOTHING  # signals that rewards read: such rewards run after the probes
    filtering: Filtering | None = None
    greedy_baseline: bool = False  # whether advantages compare with the greedy response to the prompt
    noise: NoisyRollout | None = None  # half of each group is sampled on noised images
    replay: ReplayRule | None = None
    value_loss: ValueLoss = NO_CRITIC
    maps_per_step: int = 0  # responses per step whose attention maps are recorded; -1: all
    off_policy_steps: int = 0  # steps by which rollouts are sampled ahead of the update that uses them
    critic_warmup: int = 0  # steps at the start in which only the critic learns

    @property
    def reads_reference(self) -> bool:
        """Whether the reference is read, before the update or in it."""
        return self.divergence is not None or bool(self.needs.of_reference)

    @property
    def scores_first(self) -> bool:
        """Whether a filter drops groups by their rewards before they are probed, so that only the others are."""
        return self.filtering is not None and not self.reward_needs

    def needs_at(self, step: int) -> Needs:
        return self.needs | Needs("attention_mass") if due(step + 1, self.attention_every) else self.needs


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
