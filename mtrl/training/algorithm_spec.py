"""The algorithm as values. `compose/algorithm.py` reads them off the config; the loop never looks at it."""

from __future__ import annotations

from dataclasses import dataclass

from mtrl.algorithms.batches import BatchPlan
from mtrl.algorithms.credit import Rule
from mtrl.algorithms.divergence import Divergence
from mtrl.algorithms.estimators import Estimator
from mtrl.algorithms.losses import Loss
from mtrl.algorithms.replay import ReplayRule
from mtrl.algorithms.value_loss import ValueLoss
from mtrl.training.dynamic_sampling import Filtering
from mtrl.types import Needs, Sampling

NOTHING = Needs()
NO_CRITIC = ValueLoss()


@dataclass(frozen=True)
class AlgorithmSpec:
    total_steps: int
    prompts_per_step: int
    sampling: Sampling
    needs: Needs  # the signals of every step: all that rules, rewards, divergence and trackers read
    attention_every: int  # steps between two readings for metrics; 0: attention is read only where it is needed
    estimator: Estimator
    divergence: Divergence | None
    credit: tuple[Rule, ...]
    loss: Loss
    batches: BatchPlan
    validate_every: int  # steps between two validations; -1: only at the end
    validate_first: bool
    save_every: int  # steps between two checkpoints; -1: only at the end
    seed: int = 0  # for the order of minibatches, for replay, and for credit rules that draw random numbers
    sync_ref_every: int = 0  # steps after which the reference becomes the policy of then; 0: it stays as it is
    reward_needs: Needs = NOTHING  # the signals that rewards read: they come after the probes
    filtering: Filtering | None = None
    greedy_baseline: bool = False  # whether advantages compare with the greedy response to a prompt
    replay: ReplayRule | None = None
    value_loss: ValueLoss = NO_CRITIC  # of the critic, where there is one
    maps_per_step: int = 0  # responses of a step whose attention maps are recorded; -1: of all
    off_policy_steps: int = 0  # steps by which responses are sampled ahead of the weights that learn from them
    critic_warmup: int = 0  # steps at the start of the run in which the critic learns alone

    @property
    def reads_reference(self) -> bool:
        """Whether somebody reads the reference: before the update, or in it."""
        return self.divergence is not None or "ref_logprobs" in self.needs or "divergence" in self.needs

    @property
    def scores_first(self) -> bool:
        """Whether a filter judges responses before they are measured, so that only those which stay are."""
        return self.filtering is not None and not self.reward_needs

    def needs_at(self, step: int) -> Needs:
        return self.needs | Needs("attention_mass") if due(step + 1, self.attention_every) else self.needs


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
