"""Replay: stored groups of earlier steps replace groups that teach nothing (SPEC 4).

An entry is an experience without its prompt: tokens, log-probs, signals and rewards as they were, and the task id, by
which the source reads the prompt and its media again. A checkpoint holds it as tensors and JSON:

replay/
  groups.safetensors   `<number>/rollouts/tokens`, `<number>/signals/entropy`, `<number>/rewards/parts/accuracy`, ..
  groups.json          one row per group: task, step, place (index in that step), score and texts
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtrl.algorithms.metrics import Metrics
from mtrl.algorithms.replay import ReplayBuffer, ReplayEntry, ReplayRule, exchange_groups, flat_groups, replay_scores
from mtrl.checkpoint.records import RecordSnapshot, group_by_folder, read_records, record_tensors
from mtrl.protocols import TaskSource
from mtrl.training.dynamic_sampling import CollectedBatch
from mtrl.types import Experience, Prompt, Rewards, Rollouts, Signals
from mtrl.utils.seeding import rng_for

GROUPS = "groups"


@dataclass(frozen=True, eq=False)
class StoredGroup:
    """A group of responses with the signals and rewards of its own step."""

    task: str  # id of the prompt's task
    step: int
    index: int  # the group's index in that step
    experience: Experience  # without prompts and advantages

    @classmethod
    def from_experience(cls, experience: Experience, group: int, step: int) -> StoredGroup:
        rows = experience.rows(experience.rollouts.group == group)
        (prompt,) = rows.rollouts.prompts
        lean = Experience(replace(rows.rollouts, prompts=()), rows.rewards, replace(rows.signals, attention_maps=None))
        return cls(prompt.task.id, step, group, lean)

    def entry(self, score: float) -> ReplayEntry[StoredGroup]:
        return ReplayEntry((self.step, self.index), score, self)

    def with_prompt(self, prompt: Prompt) -> Experience:
        return replace(self.experience, rollouts=replace(self.experience.rollouts, prompts=(prompt,)))


class ReplayMemory:
    """The best groups so far by `rule`. Draws are keyed by (seed, step)."""

    def __init__(self, rule: ReplayRule, seed: int) -> None:
        self.rule, self.seed = rule, seed
        self.buffer: ReplayBuffer[StoredGroup] = ReplayBuffer(rule.replay_buffer_size)

    def exchange(self, batch: CollectedBatch, prompts: int, step: int, source: TaskSource) -> CollectedBatch:
        """Replace groups without reward variance, and prompts that a filter left missing, by stored groups."""
        own = batch.experience
        flat = flat_groups(own.rewards.total, own.rollouts.group, self.rule.replay_var_epsilon).tolist()
        wanted = [*flat, *range(len(own.rollouts.prompts), prompts)]
        drawn = [each.payload for each in self.buffer.draw(len(wanted), rng_for("replay", self.seed, step))]
        metrics = batch.metrics | hit_metrics(len(wanted), [step - group.step for group in drawn])
        if not drawn:
            return replace(batch, metrics=metrics)
        stored = zip(drawn, source.get([group.task for group in drawn]), strict=True)
        experience = exchange_groups(own, flat, [group.with_prompt(prompt) for group, prompt in stored])
        replayed = tuple(wanted[: len(drawn)])
        return replace(batch, experience=experience, metrics=metrics, replaced=own, replayed=replayed)

    def admit(self, experience: Experience, replayed: Sequence[int], step: int) -> Metrics:
        """Store the groups of a step that are worth it; replayed ones are stored already."""
        assert experience.advantage is not None, "the score of a group needs its advantages"
        rollouts, total, rule = experience.rollouts, experience.rewards.total, self.rule
        scores = replay_scores(
            total, experience.advantage, rollouts.group, rollouts.mask, rule.replay_var_epsilon, rule.filter_min_reward
        ).tolist()
        new = [index for index, score in enumerate(scores) if score > 0 and index not in replayed]
        self.buffer = self.buffer.admit(StoredGroup.from_experience(experience, g, step).entry(scores[g]) for g in new)
        return {"replay/size": float(len(self.buffer.entries))}

    # ---------------------------------------------------------------------------------------------- checkpoint files
    def snapshot(self) -> RecordSnapshot:
        entries = self.buffer.entries
        groups = {str(number): entry.payload.experience for number, entry in enumerate(entries)}
        return RecordSnapshot(GROUPS, record_tensors(groups), [entry_row(entry) for entry in entries])

    def restore(self, directory: Path) -> None:
        tensors, rows = read_records(directory, GROUPS)
        entries = tuple(read_entry(row, group_by_folder(tensors[str(number)])) for number, row in enumerate(rows))
        self.buffer = ReplayBuffer(self.rule.replay_buffer_size, entries)


def hit_metrics(wanted: int, ages: Sequence[int]) -> Metrics:
    hits = {"replay/wanted": float(wanted), "replay/hits": float(len(ages))}
    return hits | ({"replay/age_mean": sum(ages) / len(ages), "replay/age_max": float(max(ages))} if ages else {})


# ------------------------------------------------------------------------------------------------------ rows of a file
def entry_row(entry: ReplayEntry[StoredGroup]) -> dict[str, Any]:
    """The fields that are no tensors."""
    group = entry.payload
    rollouts = group.experience.rollouts
    return {
        "task": group.task,
        "step": group.step,
        "place": group.index,
        "score": entry.score,
        "parts": list(group.experience.rewards.parts),  # in order
        "extra": list(group.experience.signals.extra),
        "text": rollouts.text,
        "finish": rollouts.finish_reason,
    }


def read_entry(row: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]) -> ReplayEntry[StoredGroup]:
    rewards, signals = dict(tensors["rewards"]), dict(tensors["signals"])
    parts = {name: rewards.pop(f"parts/{name}") for name in row["parts"]}
    extra = {name: signals.pop(f"extra/{name}") for name in row.get("extra", ())}
    experience = Experience(
        Rollouts(prompts=(), text=tuple(row["text"]), finish_reason=tuple(row["finish"]), **tensors["rollouts"]),
        Rewards(parts=parts, **rewards),
        Signals(**signals, extra=extra),
    )
    return StoredGroup(row["task"], row["step"], row["place"], experience).entry(row["score"])
