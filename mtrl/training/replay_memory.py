"""What a run remembers: groups of earlier steps, which stand in for groups that teach nothing (SPEC 4).

An entry is an experience without its prompt: tokens, log-probs, signals and rewards as they were, and the id of the
task, by which the source reads the prompt and its media again. A checkpoint holds it as tensors and JSON:

replay/
  groups.safetensors   `<number>/rollouts/tokens`, `<number>/signals/old`, `<number>/rewards/parts/accuracy`, ..
  groups.json          a row a group: its task, step, place and score, and what is text
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtrl.algorithms.metrics import Metrics
from mtrl.algorithms.replay import ReplayBuffer, ReplayEntry, ReplayRule, exchange_groups, flat_groups, replay_scores
from mtrl.checkpoint.records import RecordSnapshot, by_folder, read_records, record_tensors
from mtrl.protocols import TaskSource
from mtrl.training.dynamic_sampling import CollectedBatch
from mtrl.types import Experience, Prompt, Rewards, Rollouts, Signals
from mtrl.utils.seeding import rng_for

GROUPS = "groups"


@dataclass(frozen=True, eq=False)
class StoredGroup:
    """A group of responses and what was known of them when they were sampled."""

    task: str  # id of the prompt's task
    step: int
    place: int  # its number in that step
    experience: Experience  # without prompts and advantages

    @classmethod
    def of(cls, experience: Experience, group: int, step: int) -> StoredGroup:
        rows = experience.rows(experience.rollouts.group == group)
        (prompt,) = rows.rollouts.prompts
        lean = Experience(replace(rows.rollouts, prompts=()), rows.rewards, replace(rows.signals, attention_maps=None))
        return cls(prompt.task.id, step, group, lean)

    def entry(self, score: float) -> ReplayEntry[StoredGroup]:
        return ReplayEntry((self.step, self.place), score, self)

    def with_prompt(self, prompt: Prompt) -> Experience:
        return replace(self.experience, rollouts=replace(self.experience.rollouts, prompts=(prompt,)))


class ReplayMemory:
    """The best groups so far by `rule`. Draws are keyed by (seed, step)."""

    def __init__(self, rule: ReplayRule, seed: int) -> None:
        self.rule, self.seed = rule, seed
        self.buffer: ReplayBuffer[StoredGroup] = ReplayBuffer(rule.capacity)

    def exchange(self, gathered: CollectedBatch, places: int, step: int, source: TaskSource) -> CollectedBatch:
        """Stored groups in the places of those whose rewards are all equal, and in the places that a filter left
        empty."""
        own = gathered.experience
        flat = flat_groups(own.rewards.total, own.rollouts.group, self.rule.var_epsilon).tolist()
        there = len(own.rollouts.prompts)
        wanted = [*flat, *range(there, places)]
        drawn = [each.payload for each in self.buffer.draw(len(wanted), rng_for("replay", self.seed, step))]
        told = gathered.metrics | hit_metrics(len(wanted), [step - group.step for group in drawn])
        if not drawn:
            return replace(gathered, metrics=told)
        prompts = source.get([group.task for group in drawn])
        groups = [group.with_prompt(prompt) for group, prompt in zip(drawn, prompts, strict=True)]
        experience = exchange_groups(own, flat, groups)
        return replace(
            gathered, experience=experience, metrics=told, replaced=own, replayed=tuple(wanted[: len(drawn)])
        )

    def admit(self, experience: Experience, replayed: Sequence[int], step: int) -> Metrics:
        """Remembers the groups of a step that are worth it; those that were replayed are there already."""
        assert experience.advantage is not None, "a group's worth is known by its advantages"
        rollouts, total, rule = experience.rollouts, experience.rewards.total, self.rule
        scores = replay_scores(
            total, experience.advantage, rollouts.group, rollouts.mask, rule.var_epsilon, rule.min_reward
        ).tolist()
        new = [place for place, score in enumerate(scores) if score > 0 and place not in replayed]
        self.buffer = self.buffer.admit(StoredGroup.of(experience, g, step).entry(scores[g]) for g in new)
        return {"replay/size": float(len(self.buffer.entries))}

    # ---------------------------------------------------------------------------------------------- to disk and back
    def snapshot(self) -> RecordSnapshot:
        entries = self.buffer.entries
        groups = {str(number): entry.payload.experience for number, entry in enumerate(entries)}
        return RecordSnapshot(GROUPS, record_tensors(groups), [entry_row(entry) for entry in entries])

    def restore(self, directory: Path) -> None:
        tensors, rows = read_records(directory, GROUPS)
        entries = tuple(read_entry(row, by_folder(tensors[str(number)])) for number, row in enumerate(rows))
        self.buffer = ReplayBuffer(self.rule.capacity, entries)


def hit_metrics(wanted: int, ages: Sequence[int]) -> Metrics:
    told = {"replay/wanted": float(wanted), "replay/hits": float(len(ages))}
    return told | ({"replay/age_mean": sum(ages) / len(ages), "replay/age_max": float(max(ages))} if ages else {})


# ------------------------------------------------------------------------------------------------------ rows of a file
def entry_row(entry: ReplayEntry[StoredGroup]) -> dict[str, Any]:
    """What of an entry is no tensor."""
    group = entry.payload
    rollouts = group.experience.rollouts
    return {
        "task": group.task,
        "step": group.step,
        "place": group.place,
        "score": entry.score,
        "parts": list(group.experience.rewards.parts),  # in their order
        "text": rollouts.text,
        "finish": rollouts.finish_reason,
    }


def read_entry(row: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]) -> ReplayEntry[StoredGroup]:
    rewards = dict(tensors["rewards"])
    parts = {name: rewards.pop(f"parts/{name}") for name in row["parts"]}
    experience = Experience(
        Rollouts(prompts=(), text=tuple(row["text"]), finish_reason=tuple(row["finish"]), **tensors["rollouts"]),
        Rewards(parts=parts, **rewards),
        Signals(**tensors["signals"]),
    )
    return StoredGroup(row["task"], row["step"], row["place"], experience).entry(row["score"])
