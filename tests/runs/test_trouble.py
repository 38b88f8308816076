"""What happens to runs at night: signals, full and read-only disks, folders that vanish. Real processes."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import is_alive
from run_helpers import (
    SETTINGS,
    STEPS,
    ForkedRun,
    finish,
    get_run_dir,
    read_metrics,
    same_end,
    start,
    tiny_arguments,
    train_arguments,
)

from mtrl.checkpoint.folder_store import list_checkpoints, read_state
from mtrl.checkpoint.manifest import check_manifest
from mtrl.checkpoint.run_directory import RunDirectory
from mtrl.cli import main
from mtrl.tracking.jsonl import read_rows


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The output folder of an undisturbed run."""
    output = tmp_path_factory.mktemp("whole")
    assert main(train_arguments(output, *SETTINGS)) == 0
    return output


# -------------------------------------------------------------------------------------------------------------- signals
def wait_for_step(process, run):
    deadline = time.monotonic() + 90
    while not read_rows(run / "metrics.jsonl"):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_saves_and_reports_how_to_resume(tmp_path, number, status):
    command = tiny_arguments(
        tmp_path, "training.max_steps=3000", "training.val_before_train=false", "training.save_freq=-1"
    )
    process = ForkedRun(command)
    wait_for_step(process, get_run_dir(tmp_path))
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == status, said
    assert (
        f"{number.name}: finishing this step, then saving" in said
        and "the same command (in Python train()) resumes" in said
    )
    assert "Traceback" not in said
    (saved,) = list_checkpoints(get_run_dir(tmp_path) / "checkpoints")
    check_manifest(saved)
    assert read_rows(get_run_dir(tmp_path) / "metrics.jsonl")[-1]["step"] == read_state(saved)["step"]


@pytest.mark.slow
def test_a_second_ctrl_c_exits_at_once_and_cleanly(tmp_path):
    """A reward function that takes a minute holds the step; the second Ctrl-C does not wait for it."""
    slow, note = tmp_path / "slow.py", tmp_path / "ended"
    slow.write_text(f"import time\ndef slow(data):\n    time.sleep(60)\n    open({str(note)!r}, 'w')\n    return 1.0\n")
    more = [f"worker.reward.functions=[{slow}:slow]", "worker.reward.weights=[1.0]", "worker.reward.timeout_s=100"]
    process = start(train_arguments(tmp_path, "training.max_steps=9", "training.val_before_train=false", *more))
    deadline = time.monotonic() + 90
    while not get_child_pids(process.pid):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(4)  # into the step
    workers = get_child_pids(process.pid)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None, "one Ctrl-C lets the step finish"
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=50)[1]
    assert process.returncode == 130 and not note.exists(), said
    assert "Traceback" not in said and "finishing this step" in said
    assert not [pid for pid in workers if is_alive(pid)], "no process stays behind"
    status, said = finish(train_arguments(tmp_path, *more, "training.fresh=true"))
    assert status == 2 and "training.fresh" in said, "the lock is free"


def get_child_pids(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [int(each) for each in listed.split()]


# --------------------------------------------------------------------------------------------------------- the disk
def on_a_small_disk(tmp_path, megabytes: int, prepare: str, command: list[str]) -> tuple[int, str, Path]:
    """Runs the command with its output folder on a disk of that size: a tmpfs in a separate namespace, which ends with
    it. `prepare`: a shell command that runs at the same time; the remaining files are copied to a lasting folder."""
    disk, left = tmp_path / "disk", tmp_path / "left"
    disk.mkdir()
    left.mkdir()
    python = " ".join([sys.executable, "-m", "mtrl", *(f"'{word}'" for word in command)])
    script = f"mount -t tmpfs -o size={megabytes}m tmpfs {disk} || exit 99\n({prepare}) & {python}\n"
    script += f"status=$?; wait; cp -a {disk}/. {left}; exit $status"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    if "unshare" in done.stderr or done.returncode == 99:
        pytest.skip(f"no disk of our own here: {done.stderr}")
    return done.returncode, done.stderr, left


def until(condition: str) -> str:
    return f"until {condition}; do sleep 0.05; done"


@pytest.mark.slow
def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path, whole):
    """A checkpoint has 37 MB: one fits, two do not. The run continues, ends with an error that reports this, and with
    more space resumes bitwise."""
    command = [*train_arguments(whole, *SETTINGS, "training.save_limit=1"), f"training.output_dir={tmp_path / 'disk'}"]
    status, said, left = on_a_small_disk(tmp_path, 60, "true", command)
    assert status == 1, said
    assert "checkpoint of step 4 could not be saved: it needs 0.05 GB" in said and "step_2 is the last good one" in said
    assert "Training continues" in said and "Traceback" not in said
    (kept,) = list_checkpoints(get_run_dir(left) / "checkpoints")
    check_manifest(kept)
    assert kept.name == "step_2" and not list(kept.parent.glob(".step*"))
    assert read_metrics(get_run_dir(left))[STEPS, False]["step"] == STEPS, "it trained to the end"
    assert main([*train_arguments(whole, *SETTINGS), f"training.output_dir={left}"]) == 0
    same_end(get_run_dir(whole), get_run_dir(left), STEPS)


@pytest.mark.slow
def test_a_disk_that_fills_while_saving(tmp_path, whole):
    """The estimate finds room, and then somebody takes it: the write itself fails."""
    unfinished = f"{tmp_path}/disk/mtrl/zoo/checkpoints/.step_2"
    filler = f"{until(f'[ -e {unfinished} ]')}; head -c 200m /dev/zero > {tmp_path}/disk/big"
    command = [*train_arguments(whole, *SETTINGS), f"training.output_dir={tmp_path / 'disk'}"]
    status, said, left = on_a_small_disk(tmp_path, 90, filler, command)
    assert status == 1 and "could not be saved" in said and "Traceback" not in said, said
    for kept in list_checkpoints(get_run_dir(left) / "checkpoints"):
        check_manifest(kept)
    (left / "big").unlink()
    assert main([*train_arguments(whole, *SETTINGS), f"training.output_dir={left}"]) == 0
    same_end(get_run_dir(whole), get_run_dir(left), STEPS)


@pytest.mark.slow
def test_a_folder_that_turns_read_only(tmp_path, whole):
    """Only the checkpoints' folder is read-only, since files that are open elsewhere may be written to."""
    saves = f"{tmp_path}/disk/mtrl/zoo/checkpoints"
    turn = f"mount --bind {saves} {saves}; until mount -o remount,bind,ro {saves}; do sleep 0.02; done"
    command = [*train_arguments(whole, *SETTINGS, "training.max_steps=12"), f"training.output_dir={tmp_path / 'disk'}"]
    status, said, left = on_a_small_disk(tmp_path, 500, f"{until(f'[ -e {saves}/step_2 ]')}; {turn}", command)
    assert status == 1 and "could not be saved" in said and "Read-only file system" in said, said
    assert "Training continues" in said and "Traceback" not in said
    assert read_metrics(get_run_dir(left))[12, False]["step"] == 12, "it trained to the end"
    assert list_checkpoints(get_run_dir(left) / "checkpoints")
    for kept in list_checkpoints(get_run_dir(left) / "checkpoints"):
        check_manifest(kept)


@pytest.mark.slow
def test_a_run_whose_directory_was_replaced_ends_and_changes_nothing(tmp_path):
    """Another process moves it away and starts another run in its place."""
    command = train_arguments(tmp_path, "training.max_steps=3000", "training.save_freq=5", "training.val_freq=-1")
    process, run, old = start(command), get_run_dir(tmp_path), tmp_path / "old"
    while not list_checkpoints(run / "checkpoints"):
        assert process.poll() is None
        time.sleep(0.01)
    run.rename(old)
    with RunDirectory(run) as other:
        other.record("theirs")
        (run / "metrics.jsonl").write_text("")  # a log that continues would show it
        said = process.communicate(timeout=60)[1]
        assert process.returncode == 1 and "another process uses it now" in said and "Traceback" not in said, said
        assert f"the last checkpoint of this run is {list_checkpoints(old / 'checkpoints')[-1]}" in said
        assert (run / "config.yaml").read_text() == "theirs" and not (run / "checkpoints").exists()
        assert not (run / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_a_run_whose_directory_is_removed_continues(tmp_path):
    command = train_arguments(tmp_path, "training.max_steps=30", "training.save_freq=5", "training.val_freq=-1")
    process = start(command)
    saves = get_run_dir(tmp_path) / "checkpoints"
    while not list_checkpoints(saves):
        assert process.poll() is None
        time.sleep(0.01)
    shutil.rmtree(get_run_dir(tmp_path), ignore_errors=True)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 0 and "was removed during the run" in said and "Traceback" not in said, said
    assert list_checkpoints(saves)[-1].name == "step_30"
    check_manifest(list_checkpoints(saves)[-1])
    assert main(train_arguments(tmp_path, "training.max_steps=30", "training.save_freq=5", "training.val_freq=-1")) == 0
