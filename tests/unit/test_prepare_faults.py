"""Faults in `mtrl prepare`: one clear line, and no finished work is lost."""

import json
import os
import resource
import signal
import subprocess

import prepare_helpers as published
import pyarrow.parquet as pq
import pytest
from data_helpers import picture_bytes
from helpers import slow_but
from prepare_helpers import contents, read_rows

from mtrl.cli import main
from mtrl.prepare import images, shards
from mtrl.prepare import prepare_dataset as run


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("MTRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mtrl.prepare.prepare_dataset.ROWS_PER_SHARD", 4)
    monkeypatch.setattr("mtrl.prepare.shards.ROWS_PER_GROUP", 2)


def refused(capsys, *arguments, status=2):
    assert main(["prepare", *map(str, arguments)]) == status
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mtrl:")]
    return line


def in_a_child(work):
    """What the process ended with: its signal, negative, or its status."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(work())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_wrong_column_is_reported_before_anything_is_written(tmp_path, capsys):
    hub = published.aokvqa(tmp_path / "hub")
    for file in hub.glob("data/train*"):
        pq.write_table(pq.read_table(file).rename_columns({"choices": "options"}), file)
    line = refused(capsys, "aokvqa", hub)
    assert "has no column 'choices', so it is not A-OKVQA as it was published; it has image, question_id" in line
    assert not (tmp_path / "data").exists()
    line = refused(capsys, "mmmu-pro", published.mmmu_pro(tmp_path / "other") / "vision")
    assert "has no folder 'standard (4 options)'" in line
    line = refused(capsys, "arxivqa", hub)
    assert "has no folder 'queries'" in line


def test_a_missing_image_ends_it_and_written_shards_stay(tmp_path, capsys):
    folder = published.aokvqa_json(tmp_path / "aokvqa", 12)
    gone = folder / "train2017/000000299216.jpg"
    kept = gone.read_bytes()
    gone.unlink()
    line = refused(capsys, "aokvqa", folder)
    assert "000000299216.jpg does not exist" in line and "--image-dir" in line and "the 8 rows written so far" in line
    before = contents(tmp_path / "data/aokvqa")
    assert set(before) == {"train/00000.parquet", "train/00001.parquet"}
    gone.write_bytes(kept)
    assert main(["prepare", "aokvqa", str(folder)]) == 0
    after = contents(tmp_path / "data/aokvqa")
    assert before.items() <= after.items() and len(read_rows(tmp_path / "data/aokvqa")) == 12
    assert main(["prepare", "aokvqa", str(folder), "--out", "whole"]) == 0
    assert contents(tmp_path / "whole") == after


@pytest.mark.parametrize("damage", [lambda data: data[:-40], lambda data: b"", lambda data: b"no image at all"])
def test_a_damaged_image_is_left_out_if_requested(tmp_path, capsys, damage):
    folder = published.aokvqa_json(tmp_path / "aokvqa", 5)
    file = folder / "train2017/000000299208.jpg"
    file.write_bytes(damage(picture_bytes(kind="JPEG")))
    assert "000000299208.jpg" in refused(capsys, "aokvqa", folder)
    assert main(["prepare", "aokvqa", str(folder), "--skip-bad"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["rows"] == {"train": 4} and sum(said["skipped"].values()) == 1
    assert "22MexNkBPpdZGX6sxb0001" in (tmp_path / "data/aokvqa/skipped.txt").read_text()
    assert "1 rows (listed in `skipped.txt`)" in (tmp_path / "data/aokvqa/README.md").read_text()


def test_a_mark_without_an_image(tmp_path, capsys):
    hub = published.mmmu_pro(tmp_path / "hub")
    file = hub / "standard (4 options)/test-00000-of-00001.parquet"
    rows = pq.read_table(file).to_pylist()
    rows[3]["question"] = "Compare <image 1> with <image 4>."
    published.write(file, rows, published.STANDARD)
    line = refused(capsys, "mmmu-pro", hub, "--options", "4")
    assert "test_Art_3: its text shows <image 4>, and the column of that image is empty" in line


KILLS = {  # where the process ends: the function, and the number of the call
    "in a shard": (shards.ShardWriter, "add", 11),
    "before a shard is in its place": (os, "replace", 4),
    "between a shard and the journal": (shards.OutputFolder, "save", 3),
    "while an image is written": (images, "atomic_write", 9),
    "before the sheet": (run, "draw_sheet", 1),
    "before the card": (run, "render_card", 1),
}


@pytest.mark.parametrize("place", slow_but(KILLS, "in a shard"))
def test_a_killed_command_continues(tmp_path, capsys, place, monkeypatch):
    hub = published.mmmu_pro(tmp_path / "hub", 7)
    arguments = ["prepare", "mmmu-pro", str(hub), "--images", "paths", "--out"]
    assert main([*arguments, "whole"]) == 0
    home, name, call = KILLS[place]
    real, calls = getattr(home, name), []

    def killed():
        def counted(*given, **named):
            calls.append(1)
            if len(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*given, **named)

        setattr(home, name, counted)
        return main([*arguments, "cut"])

    assert in_a_child(killed) == -signal.SIGKILL
    assert not json.loads((tmp_path / "cut/.prepared.json").read_text())["complete"]
    assert "is incomplete" in refused(capsys, "merge", "cut@test")
    assert main([*arguments, "cut"]) == 0
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_a_limit_of_the_system_on_files(tmp_path, capsys):
    """A real one: no file may become larger than 20 kB, as on a disk that is full."""
    hub = published.aokvqa(tmp_path / "hub", 60)
    assert main(["prepare", "aokvqa", str(hub), "--out", "whole"]) == 0

    def limited():
        run.ROWS_PER_SHARD = 40  # a shard of more than 20 kB
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        return main(["prepare", "aokvqa", str(hub), "--out", "cut"])

    assert in_a_child(limited) == 1
    assert main(["prepare", "aokvqa", str(hub), "--out", "cut"]) == 0
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_a_full_disk(tmp_path, capsys):
    """A real one of 64 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(["mount", *options], capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small disk")
    try:
        hub = published.aokvqa(tmp_path / "hub", 60)
        line = refused(capsys, "aokvqa", hub, "--out", disk / "out", status=1)
        assert "No space left on device (0 MiB are free)" in line and "run the same command again" in line
        before = contents(disk / "out")
        assert 0 < len(before) < 15 and all(name.endswith(".parquet") for name in before), "whole shards alone"
        subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
        assert main(["prepare", "aokvqa", str(hub), "--out", str(disk / "out")]) == 0
        assert before.items() <= contents(disk / "out").items()
        assert main(["prepare", "aokvqa", str(hub), "--out", "whole"]) == 0
        assert contents(disk / "out") == contents(tmp_path / "whole")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_existing_files_are_not_changed(tmp_path, capsys):
    hub = published.aokvqa(tmp_path / "hub")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("dear to me")
    assert "mine holds something else; name another folder with --out" in refused(
        capsys, "aokvqa", hub, "--out", "mine"
    )
    assert main(["prepare", "aokvqa", str(hub), "--subset", "5", "--out", "a"]) == 0
    before = contents(tmp_path / "a")
    assert "a was prepared differently (subset was 5)" in refused(capsys, "aokvqa", hub, "--subset", "6", "--out", "a")
    published.aokvqa(hub, 28)
    assert "(the dataset has changed since)" in refused(capsys, "aokvqa", hub, "--subset", "5", "--out", "a")
    assert contents(tmp_path / "a") == before and (tmp_path / "mine/notes.txt").read_text() == "dear to me"


def test_two_at_a_time_in_one_folder(tmp_path, capsys):
    hub = published.aokvqa(tmp_path / "hub")
    other = shards.OutputFolder(tmp_path / "a", {})
    try:
        assert "another mtrl prepare writes to a" in refused(capsys, "aokvqa", hub, "--out", "a")
    finally:
        other.close()


def test_a_damaged_source_is_named(tmp_path, capsys):
    hub = published.aokvqa(tmp_path / "hub")
    file = hub / "data/train-00001-of-00002.parquet"
    data = bytearray(file.read_bytes())
    data[40:400] = bytes(360)
    file.write_bytes(bytes(data))
    assert str(file) in refused(capsys, "aokvqa", hub)
    (tmp_path / "text.parquet").write_text("nothing of the kind")
    assert "text.parquet cannot be read as Parquet" in refused(
        capsys, "aokvqa", tmp_path / "text.parquet", "--out", "b"
    )


def test_options_of_the_script_for_trl_are_answered_with_ours(capsys):
    theirs = ["--dataset_path", "org/data", "--out_dir", "my data", "--question_id_file=ids.txt", "--use_chat_template"]
    line = refused(capsys, "aokvqa", *theirs, "--subset_size", "200", "--seed", "3")
    assert line.endswith("write: mtrl prepare aokvqa org/data --out 'my data' --ids ids.txt --subset 200 --seed 3")
    line = refused(capsys, "aokvqa", "--subset_size", "0", "--out_dir", "x")  # 0 is all of them there
    assert line.endswith("write: mtrl prepare aokvqa --out x")
