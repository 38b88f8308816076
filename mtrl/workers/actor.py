"""The policy that learns, in one process."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from mtrl.algorithms.losses import Loss, total_loss
from mtrl.models.forward import Forward
from mtrl.models.perturb import Perturbation
from mtrl.types import Needs, Rollouts, Signals, TrainBatch, Weights
from mtrl.workers.micro_batches import MicroBatching

BAD_STEPS_IN_A_ROW = 3

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
        save_encoder: Callable[[Path], None],
    ) -> None:
        self.forward, self.optimization, self.perturbation = forward, optimization, perturbation
        self.update_batching, self.probe_batching = update_batching, probe_batching
        self.model = forward.backbone.model
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=optimization.lr,
            betas=optimization.betas,
            weight_decay=optimization.weight_decay,
        )
        self.version = 0
        self.optimizer_step = 0
        self.bad_steps_in_a_row = 0
        self._save_encoder = save_encoder

    # ------------------------------------------------------------------------------------------------------- probing
    def probe(self, rollouts: Rollouts, needs: Needs, step: int) -> Signals:
        """Log-probs, entropy and dependency of every token, before any update of this step."""
        rows = self.probe_batching.split(rollouts)
        parts = [self._probe(rollouts.rows(index), needs, step) for index in rows]
        return in_order(parts, torch.cat(rows))

    def _probe(self, rollouts: Rollouts, needs: Needs, step: int) -> Signals:
        views = [self.perturbation.view(p, step) for p in rollouts.prompts] if needs.dependency else None
        return self.forward.signals(rollouts, views, entropy=needs.entropy, dependency=needs.dependency)

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
        return total_loss(self.forward.logp(batch.rollouts).cpu(), batch, loss)

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

    def save(self, directory: Path) -> None:
        """A Hugging Face checkpoint that `from_pretrained` loads as it is."""
        self.model.save_pretrained(directory)
        self._save_encoder(directory)

    def restore(self, directory: Path) -> None:
        raise RuntimeError("resuming from a checkpoint is not built yet; set training.fresh or another experiment_name")


def in_order(parts: list[Signals], rows: Tensor) -> Signals:
    """Signals of row slices joined, back in the order of the whole."""
    order = torch.argsort(rows)
    joined = {}
    for f in fields(Signals):
        values = [getattr(part, f.name) for part in parts]
        if values[0] is not None:
            joined[f.name] = torch.cat(values)[order]
    return Signals(**joined)
