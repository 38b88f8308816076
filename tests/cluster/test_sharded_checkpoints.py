"""One process and three ranks resume from a checkpoint of two ranks with the same numbers."""

import json

import pytest
import torch
from helpers import close
from rank_helpers import run_ranks
from safetensors.torch import load_file
from sharded_helpers import LOSS, LOSSES, TEXT_AND_ONE_IMAGE, make_batches, make_worker
from tiny_models import plain_model_at

from mtrl.checkpoint import sharded_files as parts
from mtrl.distributed.learner_proxy import DistributedLearner, WorkerHandle
from mtrl.distributed.torchrun_group import TorchrunWorkerGroup, serve
from mtrl.models.state_dicts import exported_weights
from mtrl.workers.micro_batches import MicroBatching

FAMILY = "qwen2_5_vl"
BEFORE = 2  # updates before the checkpoint


def on_rank(ranks, kind, batches, saved, target, family=FAMILY, optimizer=None):
    """Resumes from `saved`, learns and writes its own checkpoint."""
    worker = make_worker(kind, family, MicroBatching(tokens=60, ranks=ranks), ranks, optimizer=optimizer)
    parts = {"worker": WorkerHandle(worker)}
    if not ranks.is_first:
        return serve(ranks, parts)
    worker_group = TorchrunWorkerGroup(ranks, parts)
    learner = DistributedLearner(worker_group, "worker")
    metrics = go_on(learner, kind, batches, saved)
    version = learner.publish().version
    write(learner, target)
    worker_group.close()
    return metrics, version


def go_on(worker, kind, batches, saved):
    if saved is not None:
        worker.restore(saved)
    return [worker.update([batch], LOSSES.get(kind, LOSS)) for batch in batches]


def write(worker, target):
    """Each rank writes its own shard; a single file is written only by the first rank."""
    snapshot = worker.snapshot().detached()
    assert snapshot.nbytes > 0
    target.mkdir()
    snapshot.write(target)


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("actor", FAMILY),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("critic", FAMILY), ("lora", FAMILY), ("actor", "qwen3_5"), ("actor", "qwen3_5_moe"))
        ),
    ],
)
def test_saved_by_two_and_resumed_by_one_and_three(kind, family, tmp_path):
    batches = make_batches(kind, family, TEXT_AND_ONE_IMAGE)
    whole = make_worker(kind, family, MicroBatching(tokens=60))
    expected = go_on(whole, kind, batches, None)
    first, _ = run_ranks(2, on_rank, tmp_path / "two", kind, batches[:BEFORE], None, tmp_path / "saved", family)
    check_metrics(first[0], expected[:BEFORE])

    alone = make_worker(kind, family, MicroBatching(tokens=60))
    check_metrics(go_on(alone, kind, batches[BEFORE:], tmp_path / "saved"), expected[BEFORE:])
    check_weights(exported_weights(alone.model), exported_weights(whole.model))
    assert alone.learner.version == len(batches)

    rest = batches[BEFORE:]
    found, *_ = run_ranks(3, on_rank, tmp_path / "three", kind, rest, tmp_path / "saved", tmp_path / "again", family)
    check_metrics(found[0], expected[BEFORE:])
    assert found[1] == len(batches)
    last = make_worker(kind, family, MicroBatching(tokens=60))
    last.restore(tmp_path / "again")
    check_weights(exported_weights(last.model), exported_weights(whole.model))


@pytest.mark.slow
def test_eight_bit_states_of_two_resumed_by_one_and_three(tmp_path):
    """Blocks of 256 numbers that share a scale begin and end elsewhere then."""
    pytest.importorskip("bitsandbytes")
    batches, eight_bit = make_batches("lora", FAMILY, TEXT_AND_ONE_IMAGE), {"name": "adamw_8bit"}
    whole = make_worker("lora", FAMILY, MicroBatching(tokens=60), optimizer=eight_bit)
    expected = go_on(whole, "lora", batches, None)
    saved, rest = tmp_path / "saved", batches[BEFORE:]
    run_ranks(2, on_rank, tmp_path / "two", "lora", batches[:BEFORE], None, saved, FAMILY, eight_bit)
    alone = make_worker("lora", FAMILY, MicroBatching(tokens=60), optimizer=eight_bit)
    check_metrics(go_on(alone, "lora", rest, saved), expected[BEFORE:])
    again = tmp_path / "again"
    found, *_ = run_ranks(3, on_rank, tmp_path / "three", "lora", rest, saved, again, FAMILY, eight_bit)
    check_metrics(found[0], expected[BEFORE:])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["actor", "critic"])
def test_several_files_are_written_by_several_ranks(kind, tmp_path, monkeypatch):
    """No rank holds the whole model, and together they write one checkpoint."""
    monkeypatch.setattr(parts, "FILE_BYTES", 60_000)
    batches = make_batches(kind, FAMILY, TEXT_AND_ONE_IMAGE)
    whole = make_worker(kind, FAMILY, MicroBatching(tokens=60))
    expected = go_on(whole, kind, batches, None)
    shares = run_ranks(2, in_parts, tmp_path / "two", kind, batches[:BEFORE], tmp_path / "saved")
    assert max(shares) < 0.7 * sum(shares), f"bytes that ranks held: {shares}"
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in (tmp_path / "saved").glob("model-*.safetensors"))
    assert len(files) > 2 and set(index["weight_map"].values()) == set(files)
    assert len(list((tmp_path / "saved" / "trainer").glob("optimizer-*-of-*.safetensors"))) > 2
    if kind == "actor":
        plain_model_at(tmp_path / "saved", FAMILY)
        write(make_worker("actor", FAMILY, MicroBatching(tokens=60)), tmp_path / "one")
        assert index["weight_map"].keys() == load_file(tmp_path / "one" / "model.safetensors").keys()

    alone = make_worker(kind, FAMILY, MicroBatching(tokens=60))
    check_metrics(go_on(alone, kind, batches[BEFORE:], tmp_path / "saved"), expected[BEFORE:])
    check_weights(exported_weights(alone.model), exported_weights(whole.model))
    rest = batches[BEFORE:]
    found, *_ = run_ranks(3, on_rank, tmp_path / "three", kind, rest, tmp_path / "saved", tmp_path / "again")
    check_metrics(found[0], expected[BEFORE:])


class Weighed(WorkerHandle):
    def take_snapshot(self):
        number, self.taken = super().take_snapshot()
        return number, self.taken


def in_parts(ranks, kind, batches, target):
    """The bytes that this rank held for the checkpoint."""
    worker = make_worker(kind, FAMILY, MicroBatching(tokens=60, ranks=ranks), ranks)
    part = Weighed(worker)
    if not ranks.is_first:
        serve(ranks, {"worker": part})
        return part.taken
    worker_group = TorchrunWorkerGroup(ranks, {"worker": part})
    learner = DistributedLearner(worker_group, "worker")
    go_on(learner, kind, batches, None)
    write(learner, target)
    worker_group.close()
    return part.taken


def test_an_error_while_ranks_write_is_reported_and_ends_nothing(tmp_path):
    """The disk is full only on the second rank: the driver gets the error, and the ranks continue."""
    assert run_ranks(2, failing_write, tmp_path)[0] == ("No space left on device", [3, 3])


class Part:
    def __init__(self, ranks):
        self.ranks = ranks

    def write(self, directory):
        if not self.ranks.is_first:
            raise OSError(28, "No space left on device")

    def add(self, a, b):
        return a + b


def failing_write(ranks):
    parts = {"worker": Part(ranks)}
    if not ranks.is_first:
        return serve(ranks, parts)
    worker_group = TorchrunWorkerGroup(ranks, parts)
    with pytest.raises(OSError) as error:
        worker_group.call_side_channel("worker", "write", "somewhere")
    found = worker_group.call("worker", "add", [(1, 2), (1, 2)])
    worker_group.close()
    return error.value.strerror, found


def test_files_equal_those_of_a_single_process(tmp_path):
    """The same names, tensors and sizes: plain transformers loads them."""
    write(make_worker("actor", FAMILY, MicroBatching(tokens=60)), tmp_path / "one")
    run_ranks(2, on_rank, tmp_path / "ranks", "actor", [], None, tmp_path / "two")
    names = [
        sorted(str(file.relative_to(tmp_path / each)) for file in (tmp_path / each).rglob("*"))
        for each in ("one", "two")
    ]
    assert names[0] == names[1]
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    plain_model_at(tmp_path / "two", FAMILY)


def test_a_checkpoint_of_another_model_is_an_error_on_all_ranks(tmp_path):
    """The first rank reads, and all ranks raise its error: none waits for the others."""
    write(make_worker("lora", FAMILY, MicroBatching(tokens=60)), tmp_path / "other")
    for error in run_ranks(2, refused, tmp_path / "ranks", tmp_path / "other"):
        assert "holds another model than this run's: it holds adapters" in error


def refused(ranks, directory):
    worker = make_worker("actor", FAMILY, MicroBatching(tokens=60, ranks=ranks), ranks)
    with pytest.raises(ValueError) as error:
        worker.restore(directory)
    return str(error.value)


def check_metrics(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5, abs=2e-6)


def check_weights(found, expected):
    for name, weight in expected.items():
        close(found[name], weight, rtol=0, atol=2e-6)
    assert torch.is_tensor(weight)
