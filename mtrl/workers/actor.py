"""The policy that learns, in one process."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from mtrl.algorithms.losses import Loss, total_loss, weighted_sum
from mtrl.models.forward import Forward, spread
from mtrl.models.load import load_weights
from mtrl.models.perturb import Perturbation
from mtrl.types import Needs, Rollouts, Signals, TrainBatch, Weights
from mtrl.workers.micro_batches import MicroBatching
from mtrl.workers.snapshot import ActorSnapshot, optimizer_state_of, read_counters, restore_optimizer_state

BAD_STEPS_IN_A_ROW = 3
COUNTED = ("version", "optimizer_step", "bad_steps_in_a_row")  # what an actor counts, for its snapshot

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Optimization:
    """AdamW and its schedule."""

    lr: float = 1e-6
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_steps: int = 10
    total_steps: int = 1  # optimizer steps of the whole run
    schedule: Literal["constant_with_warmup", "cosine", "linear"] = "constant_with_warmup"
    min_lr_ratio: float = 0.0
    max_grad_norm: float = 1.0

    def lr_at(self, step: int) -> float:
        """The learning rate of optimizer step 0, 1, ..: the warm-up ends at step `warmup_steps` with the full rate."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        fall = {
            "constant_with_warmup": 1.0,
            "linear": 1 - progress,
            "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        }[self.schedule]
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * fall)


class LocalActor:
    """Probes and updates a model in this process. `forward` holds the model; parameters that do not require gradients
    stay as they are."""

    def __init__(
        self,
        forward: Forward,
        optimization: Optimization,
        *,
        perturbation: Perturbation,
        update_batching: MicroBatching,
        probe_batching: MicroBatching,
        encoder_files: Mapping[str, bytes],
    ) -> None:
        self.forward, self.optimization, self.perturbation = forward, optimization, perturbation
        self.update_batching, self.probe_batching = update_batching, probe_batching
        self.model = forward.backbone.model
        self.names = {p: name for name, p in self.model.named_parameters() if p.requires_grad}
        self.parameters = list(self.names)
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=optimization.lr,
            betas=optimization.betas,
            weight_decay=optimization.weight_decay,
            fused=forward.backbone.device.type == "cuda",  # one kernel, no copies of the weights on the way
        )
        self.version = 0
        self.optimizer_step = 0
        self.bad_steps_in_a_row = 0
        self.encoder_files = encoder_files  # what stands beside the weights of a checkpoint

    # ------------------------------------------------------------------------------------------------------- probing
    def probe(self, rollouts: Rollouts, needs: Needs, step: int) -> Signals:
        """What is needed of every token, before any update of this step; with nothing needed, no pass is made."""
        needs = needs.without("reference", "divergence", "values")
        if not rollouts.visual.any():
            needs = needs.without("mass", "prompt_mass")
        if not needs:
            return Signals()
        rows = self.probe_batching.split(rollouts, needs.views)
        parts = [self._probe(rollouts.rows(index), needs, step) for index in rows]
        return in_order(parts, torch.cat(rows))

    def _probe(self, rollouts: Rollouts, needs: Needs, step: int) -> Signals:
        views = [self.perturbation.view(p, step) for p in rollouts.prompts] if needs.views == 2 else None
        return self.forward.signals(rollouts, needs, views)

    # ------------------------------------------------------------------------------------------------------ updating
    def update(self, batches: Iterable[TrainBatch], loss: Loss) -> dict[str, float]:
        """One optimizer step a batch. Metrics are means over the steps; within a step, parts of it add up."""
        self.model.train()
        steps = [self._step(batch, loss) for batch in batches]
        self.model.eval()
        self.version += 1
        finite = [step for step in steps if step["skipped_steps"] == 0] or steps
        metrics = {name: sum(step[name] for step in finite) / len(finite) for name in finite[0]}
        return metrics | {"skipped_steps": sum(step["skipped_steps"] for step in steps)}

    def _step(self, batch: TrainBatch, loss: Loss) -> dict[str, float]:
        lr = self.optimization.lr_at(self.optimizer_step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        metrics: dict[str, float] = defaultdict(float)
        for rows in self.update_batching.split(batch.rollouts):
            part, values = self._loss(batch.rows(rows), loss)
            part.backward()
            for name, value in values.items():
                metrics[name] += float(value)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.optimization.max_grad_norm))
        finite = math.isfinite(norm) and all(map(math.isfinite, metrics.values()))
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self._count_bad_steps(finite)
        self.optimizer_step += 1
        return {**metrics, "grad_norm": norm, "lr": lr, "skipped_steps": float(not finite)}

    def _loss(self, batch: TrainBatch, loss: Loss) -> tuple[Tensor, dict[str, Tensor]]:
        mask = batch.rollouts.mask
        scores = self.forward.scores(batch.rollouts, entropy=batch.old is None)
        total, metrics = total_loss(spread(scores.logp, mask).cpu(), batch, loss)
        if scores.entropy is not None:  # no probe has said it
            metrics["entropy"] = weighted_sum(batch.weights.token, spread(scores.entropy, mask).cpu())
        return total, metrics

    def _count_bad_steps(self, finite: bool) -> None:
        """A step that would poison the weights is left out; three in a row are no accident."""
        self.bad_steps_in_a_row = 0 if finite else self.bad_steps_in_a_row + 1
        if not finite:
            logger.warning("optimizer step %d has a non-finite loss or gradient and is skipped", self.optimizer_step)
        if self.bad_steps_in_a_row >= BAD_STEPS_IN_A_ROW:
            raise FloatingPointError(
                f"{BAD_STEPS_IN_A_ROW} optimizer steps in a row had a non-finite loss or gradient. Lower "
                "worker.actor.optim.lr, look at the rewards for extreme values, or compute in fp32 "
                "(worker.actor.fsdp.mixed_precision_dtype)."
            )

    # -------------------------------------------------------------------------------------------------------- weights
    def publish(self) -> Weights:
        """This version's parameters; tied ones under each of their names, since an engine may hold them apart."""
        named = self.model.named_parameters(remove_duplicate=False)
        return Weights(self.version, ((name, p.detach()) for name, p in named))

    def snapshot(self) -> ActorSnapshot:
        """All that `restore` needs; a Hugging Face checkpoint once it is written."""
        return ActorSnapshot(
            model=self.model,
            weights=self.model.state_dict(),
            optimizer_state=optimizer_state_of(self.optimizer, self.names),
            counters={name: getattr(self, name) for name in COUNTED},
            files=self.encoder_files,
        )

    def restore(self, directory: Path) -> None:
        """Goes on as the actor whose snapshot was written there would have."""
        load_weights(self.model, directory)
        restore_optimizer_state(self.optimizer, self.names, directory)
        for name, count in read_counters(directory).items():
            setattr(self, name, count)


def in_order(parts: list[Signals], rows: Tensor) -> Signals:
    """Signals of row slices joined, back in the order of the whole."""
    order = torch.argsort(rows)
    joined = {}
    for f in fields(Signals):
        values = [getattr(part, f.name) for part in parts]
        if values[0] is not None:
            joined[f.name] = torch.cat(values)[order]
    return Signals(**joined)
