"""Signals of users' classes: what they measure, how they travel with the rows of a step, and wrong ones."""

import pickle
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from helpers import close, fake_experience, fake_rollouts, same
from tiny_models import get_encoder, prompts_for, random_rollouts, shared_backbone
from view_helpers import make_step, recorded

from mtrl.algorithms.credit.perception_filter import PerceptionFilter
from mtrl.algorithms.credit.shuffled import take_signals
from mtrl.algorithms.metrics import step_metrics
from mtrl.algorithms.replay import ReplayRule
from mtrl.compose.algorithm import find_signal_fault, make_algorithm, make_signals
from mtrl.compose.policy import check_signals_available
from mtrl.config import ConfigError, load_config
from mtrl.models.forward import Forward
from mtrl.models.perturb import Perturbation
from mtrl.rewards.samples import signal_lists
from mtrl.training.replay_memory import ReplayMemory
from mtrl.types import Needs, Rewards, Signal, Signals
from mtrl.utils.errors import RunError
from mtrl.utils.record_rows import join_rows, take_rows
from mtrl.workers.reference import Reference

FAMILY = "qwen2_5_vl"


@dataclass(frozen=True)
class LogProb(Signal):
    """What old_logprobs measures, by the user's door."""

    name: ClassVar[str] = "logp"

    def measure(self, original, perturbed):
        assert perturbed is None, "one view"
        return original.map_log_probs(lambda log_probs, tokens: log_probs.gather(-1, tokens[:, None])[:, 0])


@dataclass(frozen=True)
class EntropyGap(Signal):
    """What entropy_change measures."""

    name: ClassVar[str] = "gap"
    views: ClassVar[int] = 2

    def measure(self, original, perturbed):
        before, after = (each.map_log_probs(lambda x, _: torch.special.entr(x.exp()).sum(-1))
                         for each in (original, perturbed))  # fmt: skip
        return after - before


@dataclass(frozen=True)
class States(Signal):
    count: int = 3
    name: ClassVar[str] = "states"
    shape: ClassVar[tuple[int, ...]] = (3,)

    def measure(self, original, perturbed):
        return original.hidden[:, : self.count]


@dataclass(frozen=True)
class RefLogProb(LogProb):
    name: ClassVar[str] = "ref_logp"
    model: ClassVar[str] = "reference"


@pytest.fixture(scope="module")
def rollouts():
    return random_rollouts(prompts_for(FAMILY), [0, 0, 1, 2], [3, 5, 4, 2])


@pytest.fixture(scope="module")
def forward():
    return Forward(shared_backbone(FAMILY), get_encoder(FAMILY), 0.7, chunk=4)


# ------------------------------------------------------------------------------------------------------------ measuring
def test_they_measure_what_the_built_in_ones_do(forward, rollouts):
    views = [Perturbation(seed=3).view(prompt, 1) for prompt in rollouts.prompts]
    needs = Needs("entropy_change", custom=[LogProb(), EntropyGap(), States()])
    assert needs.views == 2 and {"logp", "gap", "states", "entropy_change"} == needs.names
    signals = forward.signals(rollouts, needs | Needs("old_logprobs"), {"perturbed": views})
    close(signals.extra["logp"], signals.old_logprobs, atol=1e-6)
    close(signals.extra["gap"], signals.entropy_change, atol=1e-5)
    assert signals.entropy_change.abs().max() > 1e-3, "the views differ"
    states = signals.extra["states"]
    assert states.shape == (*rollouts.mask.shape, 3) and not states[~rollouts.mask].any()
    same(states[rollouts.mask], forward.response_hidden(rollouts)[:, :3].detach())


def test_the_reference_measures_its_own(forward, rollouts):
    reference = Reference.frozen(forward)
    with torch.no_grad():
        next(reference.forward.backbone.model.parameters()).mul_(1.5)
    needs = Needs("ref_logprobs", "old_logprobs", custom=[LogProb(), RefLogProb()])
    assert needs.of_policy.names == {"old_logprobs", "logp"} and needs.of_reference.names == {
        "ref_logprobs",
        "ref_logp",
    }
    measured = reference.start_signals(rollouts, needs.of_reference, forward)()
    close(measured.extra["ref_logp"], measured.ref_logprobs, atol=1e-6)
    assert set(measured.extra) == {"ref_logp"}
    assert not torch.allclose(measured.ref_logprobs, forward.signals(rollouts).old_logprobs)


def wrong_signal(result):
    @dataclass(frozen=True)
    class Wrong(Signal):
        name: ClassVar[str] = "wrong"

        def measure(self, original, perturbed):
            return result(original)

    return Wrong()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda it: it.hidden, r"signal Wrong returned a tensor \[14, \d+\], not \[14\]: one row per token"),
        (lambda it: 3, r"signal Wrong returned a int, not \[14\]"),
        (lambda it: it.tokens / 0, "signal Wrong returned NaN or infinity"),
        (lambda it: it.nothing, r"signal Wrong failed: AttributeError: .*nothing.* \(.*test_own_signals.py:\d+\)"),
    ],
    ids=["shape", "type", "infinity", "exception"],
)
def test_wrong_values_end_the_run(forward, rollouts, result, message):
    with pytest.raises(RunError, match=message):
        forward.signals(rollouts, Needs(custom=[wrong_signal(result)]))


def test_a_full_device_is_no_fault_of_the_signal(forward, rollouts):
    def fill(_):
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):  # the worker halves its passes
        forward.signals(rollouts, Needs(custom=[wrong_signal(fill)]))


# ----------------------------------------------------------------------------------------------------------- travelling
def make_experience(lengths, fill, width=None, **extra):
    rollouts = fake_rollouts(lengths, group=[0] * len(lengths), width=width)
    shape = rollouts.mask.shape
    values = torch.full(shape, float(fill)).where(rollouts.mask, 0.0)
    signals = Signals(old_logprobs=-values, extra={"mine": values, "pair": torch.stack([values, -values], -1), **extra})
    total = torch.arange(len(lengths)).float()
    return fake_experience(rollouts, signals, rewards=Rewards(total, {}, torch.zeros(len(lengths), dtype=torch.bool)))


def test_rows_and_joins_keep_them():
    short, long = make_experience([1, 2], 5), make_experience([3, 1], 7, alone=torch.ones(2, 3))
    joined = join_rows([short, long]).signals.extra
    assert set(joined) == {"mine", "pair"}, "a signal that one part lacks is missing"
    assert joined["mine"].tolist() == [[5, 0, 0], [5, 5, 0], [7, 7, 7], [7, 0, 0]]
    assert joined["pair"].shape == (4, 3, 2) and joined["pair"][2, 2].tolist() == [7, -7]
    picked = take_rows(join_rows([short, long]), torch.tensor([3, 0])).signals.extra["mine"]
    assert picked.tolist() == [[7, 0, 0], [5, 0, 0]]
    only = join_rows([Signals(extra={"mine": torch.ones(1, 1)}), Signals(extra={"mine": torch.ones(2, 2)})])
    assert only.extra["mine"].tolist() == [[1, 0], [1, 1], [1, 1]], "signals of ranks"


def test_two_probes_merge():
    mine, theirs = (
        Signals(extra={"mine": torch.ones(1, 1)}),
        Signals(values=torch.zeros(1, 1), extra={"b": torch.ones(1, 1)}),
    )
    assert set(mine.merge(theirs).extra) == {"mine", "b"} and mine.merge(theirs).values is not None
    with pytest.raises(AssertionError, match="two probes measured mine"):
        mine.merge(mine)


def test_a_shuffled_rule_reads_shuffled_ones():
    signals = make_experience([2, 2], 1, order=torch.tensor([[1.0, 2], [3, 4]])).signals
    row, column = torch.tensor([[1, 1], [0, 0]]), torch.tensor([[1, 0], [0, 1]])
    assert take_signals(signals, row, column).extra["order"].tolist() == [[4, 3], [1, 2]]


def test_replay_restores_them(tmp_path):
    step = make_experience([1, 2], 5)
    memory = ReplayMemory(ReplayRule(4, 1e-6, -1.0), seed=7)
    memory.admit(replace(step, advantage=torch.tensor([[-1.0, 0], [1, 1]])), (), step=3)
    (tmp_path / "replay").mkdir()
    memory.snapshot().write(tmp_path / "replay")
    again = ReplayMemory(memory.rule, seed=7)
    again.restore(tmp_path / "replay")
    (entry,) = again.buffer.entries
    for name, values in step.signals.extra.items():
        same(entry.payload.experience.signals.extra[name], values)


def test_rewards_loggers_and_the_viewer_get_them(tmp_path):
    step = make_experience([1, 2], 5)
    lists = signal_lists(step.rollouts, step.signals)
    assert lists[1]["mine"] == [5.0, 5.0] and lists[0]["pair"] == [[5.0, -5.0]]
    metrics = step_metrics(step, cut=False)
    assert metrics["signal/mine"] == 5 and "signal/pair" not in metrics
    recorded_step = make_step()
    values = torch.arange(recorded_step.rollouts.mask.numel()).view(recorded_step.rollouts.mask.shape).float()
    signals = replace(recorded_step.signals, extra={"mine": values, "pair": torch.stack([values, values], -1)})
    store = recorded(tmp_path / "record", replace(recorded_step, signals=signals))
    streams = store.response(1, 2)["streams"]
    assert streams["extra_mine"] == [4.0, 5.0] and "extra_pair" not in streams


# ---------------------------------------------------------------------------------------------------- the configuration
OWN = """
from dataclasses import dataclass
from mtrl import Needs, Signal, Weight

@dataclass(frozen=True)
class Mine(Signal):
    power: float = 1.0
    name = "mine"

    def measure(self, original, perturbed):
        return original.tokens.float() ** self.power

class Nameless(Mine):
    name = "my signal"

class Known(Mine):
    name = "entropy"

class Both(Mine):
    model = "reference"
    views = 2

class Third(Mine):
    views = 3

@dataclass(frozen=True)
class Reads(Weight):
    needs = Needs("mine")

    def apply(self, experience, key):
        return experience.signals.extra["mine"]
"""


@pytest.fixture
def configured(tmp_path):
    def configure(signals, credit="[]", **more):
        (tmp_path / "own.py").write_text(OWN)
        file = tmp_path / "run.yaml"
        file.write_text(f"optimization: {{signals: {signals}, credit: {credit}}}")
        return load_config(file, more)

    return configure


def test_a_listed_signal_is_measured_in_every_step(configured):
    spec = make_algorithm(configured("[{name: 'own.py:Mine', power: 2}]", "['own.py:Reads']"), 1)
    assert "mine" in spec.needs and "old_logprobs" in spec.needs
    assert not spec.needs.unknown
    (signal,) = spec.needs.custom
    assert signal.power == 2.0
    again = pickle.loads(pickle.dumps(spec.needs))  # as it goes to the ranks
    assert [each.power for each in again.custom] == [2.0] and "mine" in again
    assert PerceptionFilter().needs.custom == frozenset()


@pytest.mark.parametrize(
    ("signals", "message"),
    [
        ("['own.py:Nameless']", "Nameless: its class needs a name, such as"),
        ("['own.py:Known']", "Known: there is a signal entropy already"),
        ("['own.py:Mine', {name: 'own.py:Mine', power: 3}]", "Mine: there is a signal mine already"),
        ("['own.py:Both']", "Both: the reference sees the original image alone"),
        ("['own.py:Third']", "views is 1 or 2, and model is policy or reference"),
        ("['own.py:Reads']", "own.py:Reads is no signal: it must be a frozen dataclass and a Signal"),
        ("[{name: 'own.py:Mine', powr: 3}]", "own.py:Mine takes no powr; its arguments are power"),
        ("[margin]", "there is no signal margin; yours is file.py:Name"),
    ],
)
def test_wrong_declarations(configured, signals, message):
    with pytest.raises(ConfigError, match=r"optimization\.signals: .*" + message):
        make_signals(configured(signals))


def test_a_rule_whose_signal_nothing_measures(configured):
    config = configured("[]", "['own.py:Reads']")
    message = "optimization.signals: Reads needs the signal mine, which nothing measures; there are old_logprobs, "
    with pytest.raises(ConfigError, match=message):
        check_signals_available(config, make_algorithm(config, 1), can_read_attention=True)


@pytest.mark.parametrize(
    ("declared", "fault"),
    [
        ({"name": "not a name"}, "its class needs a name, such as name = 'margin': letters, digits and _"),
        ({"views": 3}, "views is 1 or 2, and model is policy or reference"),
        ({"model": "critic"}, "views is 1 or 2, and model is policy or reference"),
        (
            {"model": "reference", "views": 2},
            "the reference sees the original image alone; set views to 1, or model to policy",
        ),
        ({"views": 2}, None),
        ({"model": "reference"}, None),
    ],
)
def test_the_faults_of_a_declaration(declared, fault):
    signal = SimpleNamespace(**{"name": "mine", "views": 1, "model": "policy"} | declared)
    assert find_signal_fault(signal, []) == fault


@pytest.mark.parametrize("key", ["policy_loss", "advantage_estimator"])
def test_an_unknown_name_is_reported_under_its_key(key):
    with pytest.raises(ConfigError, match=rf"optimization\.{key}: .*own\.py"):
        make_algorithm(load_config(None, {f"optimization.{key}": "own.py:Missing"}), 1)


def test_the_log_probs_of_the_reference_come_with_the_signals():
    asked = []

    def measure(rollouts, needs):
        asked.append(needs.names)
        return Signals

    Reference(SimpleNamespace(start_signals=measure)).start_signals(None, Needs("ref_logprobs"), None)
    assert asked == [{"old_logprobs"}]
