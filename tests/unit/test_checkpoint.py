"""Checkpoints are complete or absent, damage is an error, the newest and the best stay; a failed save ends no run."""

import json
import os
import shutil
import threading
from pathlib import Path

import pytest
from run_helpers import bound_by_permissions

from mtrl.checkpoint import folder_store as module
from mtrl.checkpoint.folder_store import FolderStore, checkpoint_step, list_checkpoints, read_state
from mtrl.checkpoint.manifest import MANIFEST, DamagedCheckpoint, check_manifest, seal
from mtrl.utils.errors import RunError, StartError

METRIC = "val/reward_score"


class FakeSnapshot:
    """Writes one file of its text; may fail, wait or count its copies."""

    def __init__(self, text="weights", error=None, gate=None):
        self.text, self.error, self.gate, self.copied, self.live = text, error, gate, 0, True
        self.nbytes = len(text)

    def detached(self):
        twin = FakeSnapshot(self.text, self.error, self.gate)
        twin.live = False
        self.copied += 1
        return twin

    def write(self, directory):
        if self.gate is not None:
            assert self.gate.wait(10)
        (directory / "model.safetensors").write_text(self.text)
        if self.error is not None:
            raise self.error


class FakeLearner:
    """Restores the state that a fake snapshot wrote."""

    text = None

    def restore(self, directory):
        self.text = (directory / "model.safetensors").read_text()


def make_store(tmp_path, *arguments, **settings) -> FolderStore:
    return FolderStore(tmp_path / "checkpoints", *arguments, **settings)


def save(store, step, score=None, **snapshot):
    store.save(step, {"actor": FakeSnapshot(**snapshot)}, {"step": step}, score)
    store.wait()


def names(tmp_path) -> set[str]:
    return {path.name for path in (tmp_path / "checkpoints").iterdir()}


# ------------------------------------------------------------------------------------------------------------ manifest
@pytest.fixture
def sealed(tmp_path) -> Path:
    folder = tmp_path / "sealed"
    folder.mkdir()
    (folder / "weights").write_bytes(bytes(range(256)) * 40)
    (folder / "config.json").write_text('{"hidden_size": 64}')
    (folder / "empty").write_bytes(b"")
    (folder / "trainer").mkdir()
    (folder / "trainer" / "optimizer").write_bytes(b"0123456789" * 30)
    seal(folder)
    return folder


def test_a_sealed_folder_is_whole(sealed):
    check_manifest(sealed)
    manifest = json.loads((sealed / MANIFEST).read_text())
    assert manifest["files"]["weights"]["bytes"] == 256 * 40 and set(manifest["files"]) == {
        "weights", "config.json", "empty", "trainer/optimizer",
    }  # fmt: skip
    (sealed / "notes.md").write_text("a user may put something beside it")
    check_manifest(sealed)


@pytest.mark.parametrize("name", ["weights", "config.json", "trainer/optimizer", MANIFEST])
def test_every_single_bit_counts(sealed, name):
    path = sealed / name
    whole = path.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 199)):
        for bit in (0, 7):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            path.write_bytes(bytes(changed))
            with pytest.raises(DamagedCheckpoint, match=name):
                check_manifest(sealed)
    path.write_bytes(whole)
    check_manifest(sealed)


@pytest.mark.parametrize("name", ["weights", "config.json", "trainer/optimizer", MANIFEST])
def test_truncated_emptied_extended_or_missing_files(sealed, name):
    path = sealed / name
    whole = path.read_bytes()
    for content in (whole[:-1], whole[: len(whole) // 2], b"", whole + b"\0", whole + b" "):
        path.write_bytes(content)
        with pytest.raises(DamagedCheckpoint, match=name):
            check_manifest(sealed)
    path.unlink()
    with pytest.raises(DamagedCheckpoint, match=f"{name} is missing"):
        check_manifest(sealed)


def test_files_may_be_left_out_of_the_check(sealed):
    (sealed / "weights").write_text("other")
    check_manifest(sealed, skip=("weights",))


def test_a_manifest_that_is_valid_json_of_another_kind(sealed):
    for text in ("[]", "{}", '{"files": 3}', '{"files": {"weights": 1}, "crc32": 0}', "null"):
        (sealed / MANIFEST).write_text(text)
        with pytest.raises(DamagedCheckpoint, match=MANIFEST):
            check_manifest(sealed)


# ------------------------------------------------------------------------------------------------------- what is kept
@pytest.mark.parametrize(("limit", "kept"), [(-1, [2, 9, 10]), (2, [9, 10]), (1, [10]), (0, [10]), (5, [2, 9, 10])])
def test_the_newest_stay(tmp_path, limit, kept):
    store = make_store(tmp_path, limit)
    for step in (2, 9, 10):
        save(store, step)
    assert names(tmp_path) == {f"step_{step}" for step in kept}
    assert [checkpoint_step(path) for path in list_checkpoints(tmp_path / "checkpoints")] == kept, (
        "by number, not by name"
    )
    for path in list_checkpoints(tmp_path / "checkpoints"):
        check_manifest(path)
        assert read_state(path) == {"step": checkpoint_step(path), "metric": None, "score": None}


def test_the_best_stays_too_and_best_model_leads_to_it(tmp_path):
    store = make_store(tmp_path, 1, METRIC)
    link = tmp_path / "checkpoints" / "best_model"
    for step, score, best, kept in [
        (1, 0.2, 1, {1}),
        (2, 0.5, 2, {2}),
        (3, None, 2, {2, 3}),
        (4, 0.5, 2, {2, 4}),  # an equal score does not replace the best
        (5, 0.1, 2, {2, 5}),
        (6, float("nan"), 2, {2, 6}),
        (7, 0.6, 7, {7}),
    ]:
        assert store.is_best(score) == (step in (1, 2, 7))
        save(store, step, score)
        assert os.readlink(link) == f"step_{best}", "relative, so that a moved run keeps its best model"
        assert names(tmp_path) == {"best_model", *(f"step_{each}" for each in kept)}
        check_manifest(link)


def test_the_best_is_known_after_a_restart_and_repaired_after_a_kill(tmp_path):
    store = make_store(tmp_path, 2, METRIC)
    save(store, 1, 0.5)
    save(store, 2, 0.9)
    link = tmp_path / "checkpoints" / "best_model"
    link.unlink()
    link.symlink_to("step_1")  # killed after the rename, before the link
    again = make_store(tmp_path, 2, METRIC)
    assert os.readlink(link) == "step_2"
    assert not again.is_best(0.9) and again.is_best(0.91)
    other = make_store(tmp_path, 2, "val/avg@1")
    assert other.is_best(0.1), "scores of another metric do not compare"


def test_best_model_never_leads_nowhere(tmp_path):
    save(make_store(tmp_path, 2, METRIC), 1, 0.5)
    link = tmp_path / "checkpoints" / "best_model"
    (tmp_path / "checkpoints" / "step_1").rename(tmp_path / "checkpoints" / "step_1.damaged")
    store = make_store(tmp_path, 2, METRIC)
    assert not link.is_symlink()
    save(store, 2, 0.4)
    assert os.readlink(link) == "step_2"


def test_leftovers_of_a_kill_are_removed_at_the_start(tmp_path):
    store = make_store(tmp_path, 2)
    save(store, 1)
    for leftover in (".step_2", ".step_1.old"):
        (tmp_path / "checkpoints" / leftover).mkdir()
        (tmp_path / "checkpoints" / leftover / "model.safetensors").write_text("half")
    make_store(tmp_path, 2)
    assert names(tmp_path) == {"step_1"}


# ---------------------------------------------------------------------------------------------------- several learners
def two_snapshots(**of_critic):
    return {"actor": FakeSnapshot("of the actor"), "critic": FakeSnapshot("of the critic", **of_critic)}


def test_each_learner_is_saved_and_restored_by_its_name(tmp_path):
    store = make_store(tmp_path)
    store.save(1, two_snapshots(), {"step": 1})
    store.close()
    (saved,) = list_checkpoints(tmp_path / "checkpoints")
    check_manifest(saved)
    files = set(json.loads((saved / MANIFEST).read_text())["files"])
    assert files == {"model.safetensors", "critic/model.safetensors", "trainer_state.json"}, "the actor is at the top"
    learners = {"critic": FakeLearner(), "actor": FakeLearner()}
    store.restore(saved, learners)
    assert {name: learner.text for name, learner in learners.items()} == {
        "actor": "of the actor", "critic": "of the critic",
    }  # fmt: skip


def test_a_learner_that_fails_takes_the_whole_checkpoint_with_it(tmp_path, caplog):
    store = make_store(tmp_path)
    save(store, 1)
    store.save(2, two_snapshots(error=OSError(28, "No space left on device")), {"step": 2})
    store.wait()
    assert names(tmp_path) == {"step_1"} and "step 2 could not be saved" in caplog.text


def test_room_and_memory_are_counted_over_all_learners(tmp_path, monkeypatch, caplog):
    store, snapshots = make_store(tmp_path), two_snapshots()
    total = sum(snapshot.nbytes for snapshot in snapshots.values())
    monkeypatch.setattr(module, "free_memory", lambda: 2 * total - 1)
    store.save(1, snapshots, {"step": 1})
    assert [each.copied for each in snapshots.values()] == [0, 0] and names(tmp_path) == {"step_1"}
    monkeypatch.setattr(module, "free_memory", lambda: 2 * total)
    store.save(2, snapshots, {"step": 2})
    store.wait()
    assert [each.copied for each in snapshots.values()] == [1, 1]
    free = shutil.disk_usage(tmp_path)._replace(free=module.SLACK + total - 1)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: free)
    store.save(3, snapshots, {"step": 3})
    assert names(tmp_path) == {"step_1", "step_2"} and "step 3 could not be saved" in caplog.text


def test_a_learner_that_a_checkpoint_does_not_hold(tmp_path):
    store, learners = make_store(tmp_path), {"actor": FakeLearner(), "critic": FakeLearner()}
    save(store, 1)
    with pytest.raises(
        StartError, match=r"step_1 holds no critic, which this configuration trains; use the configuration"
    ):
        store.restore(tmp_path / "checkpoints" / "step_1", learners)
    assert learners["actor"].text is None, "no learner is partly restored"


# ------------------------------------------------------------------------------------------------------------ failures
def test_a_failed_save_keeps_the_last_good_one_and_the_run_continues(tmp_path, caplog):
    store = make_store(tmp_path, 1, METRIC)
    save(store, 1, 0.2)
    save(store, 2, 0.9, error=OSError(28, "No space left on device"))
    assert names(tmp_path) == {"step_1", "best_model"} and store.is_best(0.3), (
        "a best checkpoint that was not written does not count"
    )
    assert "step 2" in caplog.text and "No space left" in caplog.text and "step_1 is the last good one" in caplog.text
    with pytest.raises(RunError, match="step 2"):
        store.close()
    save(store, 3, 0.3)
    assert names(tmp_path) == {"step_3", "best_model"}
    store.close()


def test_a_mistake_of_ours_is_not_hidden(tmp_path):
    store = make_store(tmp_path)
    store.save(1, {"actor": FakeSnapshot(error=TypeError("ours"))}, {"step": 1})
    with pytest.raises(TypeError, match="ours"):
        store.wait()
    store.wait()


def test_without_disk_space_nothing_is_written(tmp_path, caplog, monkeypatch):
    store = make_store(tmp_path)
    save(store, 1)
    free = shutil.disk_usage(tmp_path)._replace(free=module.SLACK + 5)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: free)
    save(store, 2, text="123456")
    assert names(tmp_path) == {"step_1"} and "0.02 GB are free" in caplog.text
    save(store, 3, text="12345")
    assert names(tmp_path) == {"step_1", "step_3"}


def test_a_folder_that_cannot_be_written(tmp_path, caplog):
    store = make_store(tmp_path)
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    save(store, 1)
    assert "step 1 could not be saved" in caplog.text
    (tmp_path / "checkpoints").unlink()
    save(store, 2)
    assert names(tmp_path) == {"step_2"}


@pytest.mark.parametrize("mode", [0o500, 0o000])
def test_a_folder_that_turns_forbidden_costs_a_save_and_not_the_run(tmp_path, caplog, mode):
    store = make_store(tmp_path, 1, METRIC)
    save(store, 1, 0.5)
    (tmp_path / "checkpoints").chmod(mode)
    with bound_by_permissions():
        save(store, 2, 0.7)
    (tmp_path / "checkpoints").chmod(0o700)
    assert "step 2 could not be saved: [Errno 13] Permission denied" in caplog.text
    assert names(tmp_path) == {"step_1", "best_model"}
    save(store, 3, 0.6)
    assert names(tmp_path) == {"step_3", "best_model"}
    store.close()


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path):
    assert list_checkpoints(tmp_path / "nowhere") == []
    save(make_store(tmp_path), 1)
    (tmp_path / "checkpoints").chmod(0)
    with bound_by_permissions(), pytest.raises(PermissionError, match="checkpoints"):
        list_checkpoints(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").chmod(0o700)


def test_a_folder_that_was_removed_is_made_again(tmp_path):
    asked = []
    store = make_store(tmp_path, before_saving=lambda: asked.append(1))
    save(store, 1)
    shutil.rmtree(tmp_path / "checkpoints")
    save(store, 2)
    assert names(tmp_path) == {"step_2"} and len(asked) == 2


def test_a_rotation_that_fails_is_no_failed_save(tmp_path, caplog, monkeypatch):
    store = make_store(tmp_path, 1)
    save(store, 1)

    def busy(folder):
        raise OSError("busy")

    monkeypatch.setattr(module.FolderStore, "_rotate", lambda self: busy(self.directory))
    save(store, 2)
    assert "could not be updated: busy" in caplog.text and store.failure is None
    store.close()


# ------------------------------------------------------------------------------------------------- in the background
def test_training_continues_while_a_copy_is_written(tmp_path):
    gate, store = threading.Event(), make_store(tmp_path)
    snapshot = FakeSnapshot("first", gate=gate)
    store.save(1, {"actor": snapshot}, {"step": 1})
    assert snapshot.copied == 1 and not list_checkpoints(tmp_path / "checkpoints"), (
        "it returned before anything was there"
    )
    snapshot.text = "changed by the next update"
    gate.set()
    store.save(2, {"actor": FakeSnapshot("second")}, {"step": 2})  # waits for the first
    store.close()
    saved = [path / "model.safetensors" for path in list_checkpoints(tmp_path / "checkpoints")]
    assert [path.read_text() for path in saved] == ["first", "second"]


def test_without_memory_for_a_copy_it_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "free_memory", lambda: 13)
    store, snapshot = make_store(tmp_path), FakeSnapshot("1234567")
    store.save(1, {"actor": snapshot}, {"step": 1})
    assert snapshot.copied == 0 and names(tmp_path) == {"step_1"}
    snapshot = FakeSnapshot("123456")
    store.save(2, {"actor": snapshot}, {"step": 2})
    assert snapshot.copied == 1
    store.wait()


def test_a_failed_run_waits_for_its_save_and_an_interrupted_one_does_not(tmp_path):
    for error, kept in ((ValueError, {"step_1"}), (KeyboardInterrupt, set())):
        gate = threading.Event()
        release = threading.Timer(0.2, gate.set)
        with pytest.raises(error), make_store(tmp_path) as store:
            store.save(1, {"actor": FakeSnapshot(gate=gate)}, {"step": 1})
            release.start()
            raise error
        assert {path.name for path in list_checkpoints(tmp_path / "checkpoints")} == kept
        release.join()
        store.wait()
        shutil.rmtree(tmp_path / "checkpoints")


# -------------------------------------------------------------------------------------------------------------- strange
def test_all_files_of_a_checkpoint_have_the_mode_of_a_new_file(tmp_path):
    """safetensors makes its files readable only by the owner, for any umask."""
    folder = tmp_path / "step_1"
    folder.mkdir()
    (folder / "model.safetensors").touch(mode=0o600)
    before = os.umask(0o027)
    try:
        (folder / "config.json").write_text("{}")
        seal(folder)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o640}


@pytest.mark.parametrize("name", [MANIFEST, "model.safetensors"])
def test_a_pipe_in_a_checkpoint_is_damage(tmp_path, name):
    save(make_store(tmp_path), 1, text="")
    folder = tmp_path / "checkpoints" / "step_1"
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(DamagedCheckpoint, match=f"{name} is not a file"):
        check_manifest(folder)


def test_a_score_that_is_not_a_number_is_ignored(tmp_path):
    store = make_store(tmp_path, metric=METRIC)
    save(store, 1, score=0.5)
    state = tmp_path / "checkpoints" / "step_1" / "trainer_state.json"
    state.write_text(json.dumps({"step": 1, "metric": METRIC, "score": "high"}))
    assert module.read_score(state.parent, METRIC) == -float("inf")
