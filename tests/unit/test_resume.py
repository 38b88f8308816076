"""Where a run starts, which keys make it another run, and the lock for one process at a time."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest

from mtrl.checkpoint.folder_store import FolderStore, list_checkpoints
from mtrl.checkpoint.manifest import MANIFEST, seal
from mtrl.checkpoint.run_directory import CONFIG, RunDirectory
from mtrl.config import load_config, to_yaml
from mtrl.config.tree import known_leaves
from mtrl.data.row_settings import DataError
from mtrl.protocols import Tracker
from mtrl.tracking.jsonl import JsonlWriter, read_rows
from mtrl.tracking.several import Trackers
from mtrl.training.interrupt import Interrupt
from mtrl.training.resume import (
    Start,
    check_same_run,
    checkpoint_at,
    differing_keys,
    find_start,
    fitting_state,
    restoring,
)
from mtrl.utils.errors import Finished, RunError, StartError

NOTHING = {"actor": SimpleNamespace(nbytes=0, copied=False)}  # the attributes of snapshots that a rejected save reads


def fake_checkpoint(run, step):
    """A complete checkpoint that contains only a state."""
    folder = run / "checkpoints" / f"step_{step}"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(f'{{"step": {step}}}')
    (folder / "model.safetensors").write_bytes(b"weights" * step)
    seal(folder)
    return folder


def damage(checkpoint):
    (checkpoint / "model.safetensors").write_bytes(b"other")


# ----------------------------------------------------------------------------------------------------- where it starts
def test_an_empty_run_starts_at_the_beginning(tmp_path):
    start = find_start(tmp_path, steps=99)
    assert start == Start() and start.step == 0 and start.describe() == "starting at step 0"


def test_the_runs_newest_checkpoint_comes_first(tmp_path):
    fake_checkpoint(tmp_path / "run", 9)
    newest = fake_checkpoint(tmp_path / "run", 10)
    other = fake_checkpoint(tmp_path / "other", 50)
    start = find_start(tmp_path / "run", 99, given=str(other))
    assert (start.checkpoint, start.step, start.own) == (newest, 10, True)
    assert "resuming after step 10" in start.describe()


@pytest.mark.parametrize("named", ["other/checkpoints/step_50", "other", "other/checkpoints/best_model"])
def test_a_given_checkpoint_may_be_named_in_three_ways(tmp_path, named):
    fake_checkpoint(tmp_path / "other", 20)
    best = fake_checkpoint(tmp_path / "other", 50)
    (tmp_path / "other" / "checkpoints" / "best_model").symlink_to("step_50")
    start = find_start(tmp_path / "run", 99, given=str(tmp_path / named))
    assert (start.checkpoint, start.step, start.own) == (best, 50, False)
    assert "starting after step 50" in start.describe()


def test_a_damaged_one_is_set_aside_for_the_one_before(tmp_path, caplog):
    steps = [fake_checkpoint(tmp_path, step) for step in (10, 20, 30)]
    damage(steps[2])
    start = find_start(tmp_path, steps=99)
    assert start.step == 20 and "step_30 is damaged (model.safetensors has 5 bytes of 210)" in caplog.text
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step_10", "step_20", "step_30.damaged"}


def test_the_same_step_may_be_damaged_again(tmp_path):
    fake_checkpoint(tmp_path, 10)
    for _ in range(3):
        damage(fake_checkpoint(tmp_path, 20))
        assert find_start(tmp_path, steps=99).step == 10
    aside = {path.name for path in (tmp_path / "checkpoints").glob("step_20*")}
    assert aside == {"step_20.damaged", "step_20.damaged.2", "step_20.damaged.3"}


def test_if_all_are_damaged_it_is_an_error_and_nothing_changes(tmp_path):
    steps = [fake_checkpoint(tmp_path, step) for step in (10, 20)]
    for step in steps:
        damage(step)
    with pytest.raises(StartError, match=r"every checkpoint in .* is damaged: step_20: .*; step_10: "):
        find_start(tmp_path, steps=99)
    assert all(step.exists() for step in steps)


@pytest.mark.parametrize("name", ["checkpoints/before/step_10", "checkpoints/before/global_step_10"])
def test_a_path_as_in_easyr1_is_answered_with_the_checkpoint_that_is_meant(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    meant = fake_checkpoint(tmp_path / "outputs" / "mtrl" / "before", 10)
    with pytest.raises(StartError) as caught:
        find_start(tmp_path / "outputs" / "mtrl" / "now", 99, given=name)
    assert f"there is no {name}; did you mean {meant}?" in str(caught.value)
    with pytest.raises(StartError, match="OUTPUT_DIR/PROJECT/EXPERIMENT/checkpoints/step_N"):
        find_start(tmp_path / "outputs" / "mtrl" / "now", 99, given="checkpoints/other/step_10")


def test_a_given_one_that_is_damaged_or_no_checkpoint_is_an_error(tmp_path):
    damage(fake_checkpoint(tmp_path, 10))
    with pytest.raises(StartError, match="no complete checkpoint of a run"):
        checkpoint_at(tmp_path / "checkpoints" / "step_10")
    with pytest.raises(StartError, match="there is no checkpoint"):
        checkpoint_at(tmp_path / "nowhere")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(StartError, match=r"model_path"):
        checkpoint_at(tmp_path / "model")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(StartError, match="a run without a checkpoint"):
        checkpoint_at(tmp_path / "run")


def test_a_given_one_may_be_below_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    given = fake_checkpoint(tmp_path / "other", 50)
    assert find_start(tmp_path / "run", 99, given="~/other").checkpoint == given


def test_not_looking_for_the_last_checkpoint_never_overwrites_it(tmp_path):
    fake_checkpoint(tmp_path, 10)
    with pytest.raises(StartError, match=r"find_last_checkpoint.*step_10.*experiment_name"):
        find_start(tmp_path, steps=99, find_last=False)
    shutil.rmtree(tmp_path / "checkpoints")
    assert find_start(tmp_path, steps=99, find_last=False) == Start()


def test_a_run_that_has_done_its_steps_is_finished(tmp_path):
    fake_checkpoint(tmp_path, 10)
    with pytest.raises(Finished, match=r"is finished: step 10 of 10, .*step_10") as finished:
        find_start(tmp_path, steps=10)
    assert finished.value.directory == tmp_path
    with pytest.raises(Finished, match="step 10 of 7"):
        find_start(tmp_path, steps=7)
    assert find_start(tmp_path, steps=11).step == find_start(tmp_path, steps=None).step == 10
    with pytest.raises(StartError, match=r"nothing is left to do at step 10 of 10.*max_steps"):
        find_start(tmp_path / "new", steps=10, given=str(tmp_path))


# ------------------------------------------------------------------------------------------------- what is another run
LENGTH = ("total_epochs", "max_steps")  # a learning rate and reward weights that follow the run's length feel it too
LOGGING = (
    *("logger", "log_preview_chars", "colorize_output", "realtime_rollout_logging"),
    *("rollout_log_path", "attention_diag_log_path", "val_generations_to_log"),
    *("record_rollouts_per_step", "record_attention_maps", "record_limit_gib"),
    *("save_freq", "save_minutes", "save_limit", "best_metric", "val_freq", "val_before_train", "val_only"),
)
PLACE = ("output_dir", "project_name", "experiment_name", "find_last_checkpoint", "fresh", "load_checkpoint_path")


BAD_DATA = ("on_bad_row", "check_images", "on_unread_media")  # the sampler notices whether the rows in use are the same


def test_only_logging_length_paths_and_bad_data_may_differ():
    """The keys declare it themselves; this is the full list, so that no key gets it by accident."""
    may_change = {key for key, leaf in known_leaves().items() if leaf.may_change}
    expected = {f"training.{name}" for name in (*LENGTH, *LOGGING, *PLACE)}
    stopped = {"optimization.on_short_batch"}  # a step that was stopped has no metrics that could differ
    ranks = {f"training.{name}" for name in ("nnodes", "n_gpus_per_node", "heartbeat_s", "max_restarts")}
    ranks |= {
        "worker.actor.ulysses_size",
        "dataset.dataloader_num_workers",
    }  # which process makes prompts and rewards
    memory = {"worker.actor.model.enable_gradient_checkpointing"}  # the same numbers; auto depends on the device
    assert may_change == expected | {f"dataset.{name}" for name in BAD_DATA} | stopped | ranks | memory


def test_the_keys_that_differ_are_named():
    before = load_config(None, {"worker.actor.optim.lr": 1e-5, "training.max_steps": 4})
    now = load_config(None, {"dataset.seed": 7, "training.max_steps": 9, "training.logger": ()})
    assert differing_keys(before, now) == [
        "dataset.seed: was 42, is 7",
        "worker.actor.optim.lr: was 1e-05, is 1e-06",
    ]
    assert differing_keys(before, before) == []


def test_another_configuration_is_an_error(tmp_path):
    config = load_config(None, {"dataset.seed": 7})
    with RunDirectory(tmp_path / "run") as directory:
        assert not directory.used
        check_same_run(directory, config, fresh=True)
        directory.record(to_yaml(load_config()))
    with RunDirectory(tmp_path / "run") as directory:
        assert directory.used
        with pytest.raises(StartError, match=r"(?s)experiment_name.*dataset\.seed: was 42, is 7"):
            check_same_run(directory, config, fresh=False)
        check_same_run(directory, load_config(None, {"training.max_steps": 3}), fresh=False)
        with pytest.raises(StartError, match=r"training.fresh"):
            check_same_run(directory, load_config(), fresh=True)
        (directory.path / CONFIG).write_text("dataset: {no_such_key: 1}")
        with pytest.raises(StartError, match=r"(?s)cannot be read.*no_such_key"):
            check_same_run(directory, load_config(), fresh=False)


def test_a_missing_configuration_is_reported(tmp_path, caplog):
    with RunDirectory(tmp_path / "run") as directory:
        directory.record(to_yaml(load_config()))
        fake_checkpoint(directory.path, 10)
    refused = load_config(None, {"dataset.seed": 7})
    with RunDirectory(tmp_path / "run") as directory:
        check_same_run(directory, load_config(), fresh=False)
        assert not caplog.text
        (directory.path / CONFIG).unlink()
        check_same_run(directory, refused, fresh=False)
    (warning,) = caplog.messages
    assert "config.yaml is missing" in warning and "choose another training.experiment_name" in warning


# --------------------------------------------------------------------------------------------- one process at a time
@contextmanager
def another_process(run):
    """Holds the run's folder as a run does, until it is killed."""
    code = "import sys, time; from pathlib import Path; from mtrl.checkpoint.run_directory import RunDirectory\n"
    code += "held = RunDirectory(Path(sys.argv[1])); held.record('theirs'); print('held', flush=True); time.sleep(60)"
    owner = subprocess.Popen([sys.executable, "-c", code, str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout.readline() == "held\n"
        yield owner.pid
    finally:
        owner.kill()
        owner.communicate()


def test_a_run_in_use_is_an_error_and_free_after_a_kill(tmp_path):
    with (
        another_process(tmp_path / "run") as owner,
        pytest.raises(StartError, match=f"in use by process {owner} on .*experiment_name"),
    ):
        RunDirectory(tmp_path / "run")
    RunDirectory(tmp_path / "run").close()


@pytest.mark.parametrize("finished", [False, True], ids=["at work", "finished"])
@pytest.mark.parametrize("moved", [False, True], ids=["removed", "moved"])
def test_a_folder_that_another_process_has_taken_is_not_touched(tmp_path, finished, moved):
    """Neither by a save nor by a log."""
    run, logs = tmp_path / "run", JsonlWriter(tmp_path / "run" / "metrics.jsonl")

    class Log(Tracker):
        def metrics(self, step, values):
            logs.append([values])

    with RunDirectory(run) as directory:
        directory.record("ours")
        fake_checkpoint(run, 10)
        store = FolderStore(run / "checkpoints", before_saving=directory.recreate_if_removed)
        tracker = Trackers([Log()], before=directory.check_still_ours)
        tracker.metrics(10, {"step": 10})
        assert read_rows(run / "metrics.jsonl") == [{"step": 10}]
        shutil.move(run, tmp_path / "old") if moved else shutil.rmtree(run)
        tracker.metrics(11, {"step": 11})  # it is not locked yet, so it is made again
        shutil.rmtree(run)
        with another_process(run):
            fake_checkpoint(run, 99)  # theirs, and not to be taken for ours
            if not finished:
                message = every_way_is_refused(store, tracker)
        if finished:
            message = every_way_is_refused(store, tracker)
    last = tmp_path / "old" / "checkpoints" / "step_10"
    assert f"the last checkpoint of this run is {last}." in message if moved else "were removed with it" in message
    assert {path.name for path in run.iterdir()} == {"run.lock", "run_id", CONFIG, "checkpoints"}
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["step_99"]
    assert (run / CONFIG).read_text() == "theirs" and (run / "run_id").read_text() != directory.id


def every_way_is_refused(store, tracker) -> str:
    for write in (lambda: tracker.metrics(12, {"step": 12}), lambda: store.save(12, NOTHING, {"step": 12})):
        with pytest.raises(RunError, match=r"another process uses it now\. This run has not touched it") as refused:
            write()
    return str(refused.value)


def test_the_id_stays(tmp_path):
    with RunDirectory(tmp_path / "run") as first:
        pass
    with RunDirectory(tmp_path / "run") as second, RunDirectory(tmp_path / "another") as other:
        assert first.id == second.id != other.id and len(first.id) == 12


def test_a_removed_directory_is_made_again(tmp_path, caplog):
    with RunDirectory(tmp_path / "run") as directory:
        directory.record("a: 1\n")
        directory.recreate_if_removed()
        assert not caplog.text
        shutil.rmtree(tmp_path / "run")
        directory.recreate_if_removed()
        assert "was removed during the run" in caplog.text
        assert (tmp_path / "run" / CONFIG).read_text() == "a: 1\n"
        with pytest.raises(StartError, match=f"in use by process {os.getpid()}"):
            RunDirectory(tmp_path / "run")


def test_a_removed_directory_that_cannot_be_made_is_tried_again(tmp_path):
    place = tmp_path / "runs"
    with RunDirectory(place / "run") as directory:
        shutil.rmtree(place)
        place.symlink_to("nowhere")
        for _ in range(2):
            with pytest.raises(OSError, match="runs"):
                directory.recreate_if_removed()
        place.unlink()
        directory.recreate_if_removed()
        assert (place / "run" / "run_id").read_text() == directory.id


@pytest.mark.slow  # 2 s
def test_workers_of_a_killed_run_do_not_keep_its_lock(tmp_path):
    """Forked workers inherit the lock; they must not outlive the run."""
    code = """
import sys, time
from pathlib import Path
from mtrl.data.parallel import map_rows
from mtrl.checkpoint.run_directory import RunDirectory

def job(row):
    print(row, flush=True)
    time.sleep(0.01)

held = RunDirectory(Path(sys.argv[1]))
map_rows(job, range(2000), "rows", workers=2)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        owner.stdout.readline()  # the workers are at it
        owner.kill()
        owner.communicate(timeout=20)  # until the last of them has let go of the pipe
    finally:
        with suppress(ProcessLookupError):
            os.killpg(owner.pid, signal.SIGKILL)
    RunDirectory(tmp_path / "run").close()


def test_a_directory_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StartError, match=r"training.output_dir"):
        RunDirectory(tmp_path / "file" / "run")


# ------------------------------------------------------------------------------------------------------------- signals
def test_the_first_signal_requests_a_stop_and_a_second_ctrl_c_exits(capfd):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.asked()
        os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert "SIGINT: finishing this step, then saving; Ctrl-C again" in capfd.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        interrupt.leave()


def test_sigterm_may_come_several_times():
    with Interrupt() as interrupt:
        interrupt.leave()  # no stop was requested
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        interrupt.leave()
    assert left.value.code == 143


def test_a_second_ctrl_c_ends_the_wait_for_a_save(tmp_path):
    """A run that saves waits for a thread."""
    release, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: release.wait(20) and ended.set())
    thread.start()
    timers = [threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)) for delay in (0.1, 0.2)]
    with pytest.raises(KeyboardInterrupt), Interrupt():
        for timer in timers:
            timer.start()
        thread.join()
    assert not ended.is_set(), "the exit did not wait for it"
    release.set()
    assert ended.wait(20)


def test_away_from_the_main_thread_no_signal_is_touched():
    before, errors = signal.getsignal(signal.SIGINT), []

    def body():
        try:
            with Interrupt() as interrupt:
                assert not interrupt.asked() and signal.getsignal(signal.SIGINT) is before
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert not errors


# ------------------------------------------------------------------------------------------------------- strange states
@pytest.mark.parametrize("name", ["run.lock", "run_id", "config.yaml", "metrics.jsonl", "bad_rows.jsonl"])
def test_a_pipe_instead_of_a_file_is_named(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(StartError, match=f"{name} is not a file"):
        RunDirectory(tmp_path)


@pytest.mark.parametrize("target", ["nowhere", "checkpoints"])
def test_checkpoints_that_lead_nowhere_are_no_new_start(tmp_path, target):
    (tmp_path / "checkpoints").symlink_to(target)
    with pytest.raises(StartError, match="checkpoints is not a folder"):
        RunDirectory(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"\x1b[2J"])
def test_an_invalid_run_id_is_named(tmp_path, content):
    (tmp_path / "run_id").write_bytes(content)
    with pytest.raises(StartError, match="run_id does not hold the id"):
        RunDirectory(tmp_path)


@pytest.mark.parametrize("state", ["[]", "{}", '{"step": "ten"}', '{"step": -1}', '{"step": true}', "[" * 10**5])
def test_a_changed_state_with_a_valid_checksum_is_named(tmp_path, state):
    folder = fake_checkpoint(tmp_path, 10)
    (folder / "trainer_state.json").write_text(state)
    (folder / MANIFEST).unlink()
    seal(folder)
    with pytest.raises(StartError, match=r"step_10: trainer_state.json .*; move the folder away"):
        find_start(tmp_path, 99)
    with pytest.raises(StartError, match=r"trainer_state\.json"):
        find_start(tmp_path / "new", 99, given=str(folder))


@pytest.mark.parametrize("error", [KeyError("source"), TypeError("'int' object is not subscriptable"), ValueError("x")])
def test_errors_of_a_changed_state_name_the_file(tmp_path, error):
    message = rf"trainer_state.json or trainer/ of .*step_9 was changed .*{type(error).__name__}"
    with pytest.raises(StartError, match=message), restoring(tmp_path / "step_9"):
        raise error
    with pytest.raises(DataError, match="the data changed"), restoring(tmp_path / "step_9"):
        raise DataError("the data changed")


def test_another_run_does_not_see_the_files_of_the_first(tmp_path):
    source = SimpleNamespace(restore=lambda state: None, state=lambda: {"next": 9})
    start = Start(tmp_path / "step_4", {"step": 4, "source": {"next": 9}, "prompts": {"used": 8}, "replay": 3})
    assert fitting_state(start, source) == {"step": 4, "source": {"next": 9}, "prompts": {"used": 8}}
