"""Fakes of the loop's components; each records its calls and their arguments in one journal."""

from dataclasses import fields

import torch
from helpers import fake_prompt

from mtrl.algorithms.advantages import Grpo
from mtrl.algorithms.batches import BatchPlan
from mtrl.algorithms.losses import Loss
from mtrl.rollout.lifecycle import EngineLifecycle
from mtrl.rollout.responses import make_rollouts
from mtrl.training.algorithm_spec import AlgorithmSpec
from mtrl.training.loop import Components, Loop
from mtrl.training.validation import Validation
from mtrl.types import Needs, Rewards, Sampling, Signals, Weights

PROMPTS, RESPONSES = 2, 2  # in a step
REFERENCE = torch.full((4, 4), -0.8)  # log-probs, where the actor's are -1


class FakeSource:
    """Prompts p0, p1, ..: the first without an image."""

    def __init__(self, journal):
        self.journal, self.next = journal, 0

    def take(self, count):
        self.journal.append(("take", count))
        names = range(self.next, self.next + count)
        self.next += count
        return self.get([f"p{i}" for i in names])

    def get(self, ids):
        return [fake_prompt(name, visual=name != "p0") for name in ids]

    def metrics(self):
        return {}

    def state(self):
        return {"next": self.next}

    def restore(self, state):
        self.next = state["next"]


class FakeGenerator(EngineLifecycle):
    """Rows of 1, 2, 3, 4 tokens; fails for a version that is not loaded, and while it sleeps."""

    def __init__(self, journal):
        self.journal, self.version = journal, 0

    def wake(self):
        self.journal.append(("wake",))

    def sleep(self):
        self.journal.append(("sleep",))

    def generate(self, prompts, sampling):
        assert self.is_resident
        self.journal.append(("generate", sampling.step, sampling.version))
        assert sampling.version == self.version
        rows = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(sampling.n)]
        lengths = [1 + row % 4 for row in range(len(rows))]
        return make_rollouts(
            prompts,
            [prompt for prompt, _ in rows],
            [range(length) for length in lengths],
            [[-1.0] * length for length in lengths],
            text=[f"{prompts[prompt].task.id} response {sample}" for prompt, sample in rows],
            finish=["length" if length == 4 else "stop" for length in lengths],
            version=self.version,
            pad_id=0,
        )

    def load(self, weights):
        assert self.is_resident
        self.journal.append(("load", weights.version))
        self.version = weights.version


class FakeScorer:
    """Returns the same rewards every time, or `accuracy` by the text of the response."""

    def __init__(self, journal, total=(1.0, 0.0, 2.0, 0.0), accuracy=None):
        self.journal, self.total, self.accuracy = journal, total, accuracy

    def submit(self, rollouts, step):
        self.journal.append(("submit", step))
        values = list(self.total)
        if self.accuracy is not None:
            values = [self.accuracy[text] for text in rollouts.text]
        scores = torch.tensor(values[: len(rollouts)])
        rewards = Rewards(scores.nan_to_num(0.0), {"accuracy": scores}, torch.zeros(len(rollouts), dtype=torch.bool))
        return FakePending(self.journal, rewards)


class FakePending:
    def __init__(self, journal, rewards):
        self.journal, self.rewards = journal, rewards

    def result(self, signals=None):
        self.journal.append(("result",))
        return self.rewards


class FakeActor:
    """Returns the given signals and stores the batches of its updates."""

    def __init__(self, journal, **signals):
        self.journal, self.version, self.updates = journal, 0, []
        self.signals = {"old_logprobs": torch.full((4, 4), -1.0)} | signals

    def probe(self, rollouts, needs, step):
        self.journal.append(("probe", step))
        return Signals(**{name: value.where(rollouts.mask, 0.0) for name, value in self.signals.items()})

    def update(self, batches, loss):
        batches = list(batches)
        self.journal.append(("update", len(batches)))
        self.updates.append((batches, loss))
        self.version += 7  # the loop must not assume that versions count by 1
        return {"pg_loss": 0.5, "grad_norm": 2.0}

    def publish(self):
        self.journal.append(("publish", self.version))
        return Weights(self.version, {})

    def snapshot(self):
        return f"snapshot of version {self.version}"

    def restore(self, directory):
        self.version = 7 * int(directory.name)


class FakeReference:
    def __init__(self, journal, **signals):
        self.journal, self.signals = journal, signals

    def probe(self, rollouts, needs, step):
        assert "ref_logprobs" in needs or "divergence" in needs
        self.journal.append(("reference", step))
        return Signals(**{name: value.where(rollouts.mask, 0.0) for name, value in self.signals.items()})


class FakeSyncedReference:
    """A synced reference that counts its syncs."""

    def __init__(self, journal=None):
        self.journal, self.times = journal, 0

    def sync(self):
        self.times += 1
        self.journal.append(("sync", self.times))

    def snapshot(self):
        return f"reference, synced {self.times} times"

    def restore(self, directory):
        self.times = int(directory.name)


class FakeTracker:
    def __init__(self, journal):
        self.journal, self.rows, self.closed = journal, {}, 0

    def metrics(self, step, values):
        self.journal.append(("metrics", step))
        self.rows[step] = values

    needs = Needs()

    def rollouts(self, step, experience):
        self.journal.append(("rollouts", step))

    def validation(self, step, values, by, samples):
        self.journal.append(("validation", step))

    def close(self):
        self.closed += 1


class FakeStore:
    def __init__(self, journal):
        self.journal, self.saved, self.best = journal, {}, -1.0

    def is_best(self, score):
        return score is not None and score > self.best

    def save(self, step, snapshots, state, score):
        self.journal.append(("save", step))
        self.saved[step] = (snapshots, state, score)
        self.best = self.best if score is None else max(self.best, score)

    def restore(self, checkpoint, learners):
        for learner in learners.values():
            learner.restore(checkpoint)

    def close(self):
        self.journal.append(("all saved",))


def spec(**changes):
    settings = {
        "total_steps": 1,
        "prompts_per_step": PROMPTS,
        "sampling": Sampling(n=RESPONSES, max_new_tokens=4),
        "needs": Needs("old_logprobs"),
        "attention_every": 0,
        "estimator": Grpo("none"),
        "credit": (),
        "divergence": None,
        "loss": Loss(),
        "val_freq": -1,
        "validate_first": False,
        "save_freq": -1,
    }
    plan = {"global_batch_size": PROMPTS, "max_response_length": 8}
    plan |= {f.name: changes.pop(f.name) for f in fields(BatchPlan) if f.name in changes}
    return AlgorithmSpec(**settings | {"batches": BatchPlan(**plan)} | changes)


def loop(actor=None, reference=None, validation=None, scorer=None, refreshed=None, **changes):
    journal = []
    actor = actor or FakeActor(journal)
    actor.journal = journal
    probers = [actor]
    if reference is not None:
        reference.journal = journal
        probers.append(reference)
        changes.setdefault("needs", Needs("old_logprobs", *reference.signals))
    components = Components(
        source=FakeSource(journal),
        generator=FakeGenerator(journal),
        scorer=scorer or FakeScorer(journal),
        probers=probers,
        actor=actor,
        tracker=FakeTracker(journal),
        store=FakeStore(journal),
        validation=validation,
        reference=refreshed,
    )
    components.scorer.journal = journal
    if refreshed is not None:
        refreshed.journal = journal
    return Loop(components, spec(**changes))


def make_validation(prompts=2, batch=2, **sampling):
    names = [f"v{i}" for i in range(prompts)]
    batches = [[fake_prompt(name) for name in names[i : i + batch]] for i in range(0, prompts, batch)]
    return Validation(lambda: batches, Sampling(**{"n": 2, "max_new_tokens": 4} | sampling))
