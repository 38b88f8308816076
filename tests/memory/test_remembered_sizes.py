"""The second start of a run uses the sizes that the first one has found, after one update; anything that is otherwise
than it was makes it search again. There is no GPU here: passes are left out, and memory is what a test says."""

import json
import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from tiny_models import checkpoint, get_encoder

from mtrl.compose import memory_limits
from mtrl.config import load_config
from mtrl.memory import kept_layers, remembered_sizes
from mtrl.memory.kept_layers import MARGIN
from mtrl.memory.pass_sizes import PassSizes
from mtrl.memory.preflight import GIB, DoesNotFit
from mtrl.memory.remembered_sizes import SLACK, RememberedSizes, Sizes
from mtrl.models.activation_checkpointing import enable_activation_checkpointing
from mtrl.models.backbone import Backbone
from mtrl.models.forward import Forward
from mtrl.models.load_model import load_model
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Needs
from mtrl.workers.micro_batches import MicroBatching

ALL, UPDATE = ("all",), ("optimizer", "update")
AGAIN = "they are measured again\n"


class Card:
    """A GPU of 100 GiB. An update takes 10 GiB, and 5 more for each layer that keeps its activations. `cut`: passes of
    the configured size do not fit. `full`: nor do kept layers."""

    def __init__(self):
        self.free, self.update, self.layer, self.full, self.cut = 90 * GIB, 10 * GIB, 5 * GIB, False, False
        self.name, self.spare = "a card", 0
        self.phases = []

    def run(self, policy, encoder, limits, *, generator, watch_update=nullcontext, only=ALL, seconds=None, **options):
        self.phases.append(only)
        with watch_update():
            pass
        if seconds is not None:
            seconds.update(dict.fromkeys(["update"] if only == UPDATE else ["sample", "probe", "update"], 1.0))
        kept = sum(not layer.gradient_checkpointing for layer in policy.backbone.language_model.layers)
        if (self.cut and limits.update.tokens is None) or (self.full and kept):
            raise DoesNotFit("update", "memory: it does not fit")
        if only == ALL:
            generator.rows_at_once = 64  # as if more had not fitted
        return {"sample": GIB, "probe": 2 * GIB, "update": self.update + kept * self.layer}


@pytest.fixture
def card(monkeypatch, tmp_path):
    card = Card()
    monkeypatch.setenv("MTRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Backbone, "device", torch.device("cuda"))
    monkeypatch.setattr(memory_limits, "preflight", card.run)
    monkeypatch.setattr(kept_layers, "spare_bytes", lambda device: card.spare)
    monkeypatch.setattr(remembered_sizes, "free_bytes", lambda device: card.free)
    monkeypatch.setattr(remembered_sizes, "slack_bytes", lambda device: int(SLACK * 100 * GIB))
    monkeypatch.setattr(remembered_sizes, "describe_device", lambda device: [card.name])
    return card


def start(card, pass_sizes=None, **words):
    """A start of a run: the phases that ran, and the sizes of the learners, the engine and the model."""
    card.phases.clear()
    model = load_model(checkpoint("qwen2"))
    forward = Forward(Backbone(model), get_encoder("qwen2"))
    enable_activation_checkpointing(model, "auto")
    batching = MicroBatching(at_least=1 << 20)
    learners = [
        SimpleNamespace(name=name, kept_layers=(), configured_batching=batching, cut_to=0, encodes_ahead=False)
        for name in ("actor", "critic")
    ]
    engine = LocalGenerator(forward.backbone, forward.encoder)
    config = load_config(None, {"worker.actor.model.model_path": str(checkpoint("qwen2")), **words})
    seconds = memory_limits.preflight_on_gpu(
        config, forward, engine, Needs("old_logprobs", "ref_logprobs"), False, learners, pass_sizes=pass_sizes
    )
    kept = [not layer.gradient_checkpointing for layer in forward.backbone.language_model.layers]
    assert len(learners[0].kept_layers) == sum(kept)
    sizes = kept, [(each.cut_to, each.configured_batching) for each in learners], engine.rows_at_once
    return [*card.phases], sizes, seconds


def files(tmp_path):
    return sorted((tmp_path / "cache" / "memory").iterdir())


@pytest.mark.parametrize("cut", [False, True])
def test_the_second_start_runs_one_update_and_has_the_same_sizes(cut, card, tmp_path, capfd):
    card.cut = cut
    phases, first, seconds = start(card)
    assert phases == [ALL] * (1 + cut) + [UPDATE], "the chosen update is run once"
    assert first[0] == [True] * 3 and first[2] == 64 and (first[1][0][0] > 0) == cut
    assert seconds.keys() == {"sample", "probe", "update", "search"}
    capfd.readouterr()
    phases, second, seconds = start(card)
    assert (phases, second) == ([UPDATE], first) and seconds.keys() == {"update"}
    [file] = files(tmp_path)
    said = capfd.readouterr().err
    assert f"memory: the sizes of passes are those of an earlier start, remembered in {file}\n" in said
    assert "auto keeps the activations of 3 of 3 layers" in said
    assert "memory at the limits: sample 1.0 GiB, probe 2.0 GiB, update 25.0 GiB\n" in said


@pytest.mark.parametrize("kept", [0, 3])
def test_smaller_passes_are_remembered(kept, card):
    """Those of the search, which keeps no more layers than then."""
    sizes = Sizes({"update": 1}, 0, kept_layers=kept, update_tokens=500, cut_to=1000, rows_at_once=0)
    limits = memory_limits.make_limits(load_config(None, {}), Needs(), on_gpu=True, share_prefix=True)
    limited = sizes.limit(limits)
    assert (limited.update.tokens, limited.probe.tokens) == (500, 1000)
    layers = kept_layers.KeepableLayers([SimpleNamespace() for _ in range(4)], int, int)
    learners = [SimpleNamespace(configured_batching=MicroBatching(800), cut_to=0) for _ in range(2)]
    sizes.apply(layers, learners, None)
    assert [each.configured_batching.tokens for each in learners] == [500, 800]
    assert [each.cut_to for each in learners] == [1000, 1000] and len(learners[0].kept_layers) == kept


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"worker.rollout.seed": 7, "worker.actor.optim.lr": 1e-5, "training.experiment_name": "other"}, True),
        ({"dataset.max_response_length": 100}, False),
        ({"worker.actor.fsdp.param_dtype": "bf16"}, False),
        ({"worker.actor.model.attn_implementation": "eager"}, False),
        ({"worker.rollout.temperature": 0.5}, False),
        ("card", False),
        ("code", False),
        ("libraries", False),
    ],
    ids=str,
)
def test_what_the_sizes_depend_on(change, same, card, tmp_path, monkeypatch):
    start(card)
    if change == "card":
        card.name = "another"
    elif change == "code":
        monkeypatch.setattr(remembered_sizes, "code_version", lambda: "other code")
    elif change == "libraries":
        monkeypatch.setattr(remembered_sizes, "library_version", lambda name: "2.0")
    phases, *_ = start(card, **(change if isinstance(change, dict) else {}))
    assert (phases == [UPDATE]) == same and len(files(tmp_path)) == 2 - same
    assert same or phases == [ALL, UPDATE]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"free": 80 * GIB}, "80.0 GiB are free, 90.0 were then"),
        ({"free": 99 * GIB}, "99.0 GiB are free, 90.0 were then"),
        ({"update": 14 * GIB}, "the update takes 29.0 GiB, it took 25.0"),
        ({"full": True, "spare": -1}, "the update does not fit"),
    ],
    ids=str,
)
def test_sizes_that_are_not_right_any_more_are_forgotten(change, said, card, tmp_path, capfd):
    start(card)
    vars(card).update(change)
    capfd.readouterr()
    phases, sizes, _ = start(card)
    tried = [UPDATE] * ("free" not in change)
    assert phases[: len(tried) + 1] == [*tried, ALL], "then everything, as if nothing had been remembered"
    message = capfd.readouterr().err
    [file] = files(tmp_path)
    assert f"memory: the sizes in {file} are not those of this start ({said}); {AGAIN}" in message
    assert sizes[0] == [not card.full] * 3
    phases, again, _ = start(card)
    assert phases == [UPDATE] and again == sizes, "the new ones are remembered"


def test_a_little_more_or_less_is_the_same(card):
    start(card)
    card.free, card.update = card.free - 2 * GIB, card.update + 2 * GIB
    assert start(card)[0] == [UPDATE]
    assert 2 * SLACK < MARGIN, "both together leave a part of the margin"


@pytest.mark.parametrize(("lost", "right"), [(-1, True), (0, True), (10, True), (11, False)])
def test_a_phase_that_is_left_out_must_fit(lost, right):
    """Of 200 bytes; the probe takes 90 beside 100 of the optimizer, and sampling was alone."""
    peaks = {"sample": 190, "optimizer": 100, "probe": 90, "update": 10}
    sizes = Sizes(peaks, 200, kept_layers=0, update_tokens=0, cut_to=0, rows_at_once=0)
    assert (sizes.explain_other_room(200 - lost, slack=50) is None) == right


def test_a_learner_keeps_its_own_cut():
    """A critic's of a resumed run, unless the search has cut the passes of both."""
    layers = kept_layers.KeepableLayers([], int, int)
    for cut_to, expected in ((400, [400, 100]), (200, [200, 200])):
        learners = [SimpleNamespace(cut_to=400), SimpleNamespace(cut_to=100)]
        Sizes({"update": 1}, 0, 0, 0, cut_to, 0).apply(layers, learners, None)
        assert [each.cut_to for each in learners] == expected


GOOD = {"peaks": {"update": 1}, "room": 1, "kept_layers": 0, "update_tokens": 0, "cut_to": 0, "rows_at_once": 0}


WRONG = (
    {"peaks": {}}, {"peaks": [1]}, {"peaks": {"probe": 1}}, {"cut_to": -1}, {"kept_layers": "3"}, {"room": True},
    {"more": 1},
)  # fmt: skip


@pytest.mark.parametrize("content", ["", "{", "[]", "7", "{}", *(json.dumps(GOOD | wrong) for wrong in WRONG)])
def test_a_damaged_file_is_replaced(content, card, tmp_path, capfd):
    file = RememberedSizes(tmp_path / "cache" / "memory" / "x.json", torch.device("cuda"))
    file.file.parent.mkdir(parents=True)
    file.file.write_text(content)
    assert file.read() is None
    said = capfd.readouterr().err
    assert said.startswith(f"memory: {file.file} cannot be read (") and said.count("\n") == 1
    file.write(Sizes.from_json(json.dumps(GOOD)))
    assert file.read() == Sizes(**GOOD) and files(tmp_path) == [file.file], "no temporary file is left"


def test_a_run_starts_with_a_damaged_file(card, tmp_path):
    start(card)
    [file] = files(tmp_path)
    stored = file.read_text()
    file.write_text(stored[: len(stored) // 2])
    assert start(card)[0] == [ALL, UPDATE]
    assert file.read_text() == stored and start(card)[0] == [UPDATE]


def test_a_run_starts_without_a_cache(card, tmp_path, caplog):
    (tmp_path / "cache").write_text("a file")
    with caplog.at_level(logging.WARNING):
        assert start(card)[0] == [ALL, UPDATE]
    assert "cannot store the sizes of passes in" in caplog.text


def test_ranks_search_at_every_start(card, tmp_path):
    for _ in range(2):
        assert start(card, PassSizes(tmp_path / "passes.json"))[0] == [ALL]
    assert not (tmp_path / "cache").exists()


def test_a_start_is_described_alike_in_every_process(card, monkeypatch):
    seen = []
    real = remembered_sizes.describe_start
    monkeypatch.setattr(memory_limits, "describe_start", lambda *x, **y: seen.append(real(*x, **y)) or seen[-1])
    start(card)
    described = json.dumps(seen[0])
    assert " at 0x" not in described and str(checkpoint("qwen2")) not in described
    assert seen[0]["limits"]["needs"] == ["attention_mass", "old_logprobs", "ref_logprobs"], "sorted"
