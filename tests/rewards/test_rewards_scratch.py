"""Temporary directories: those of running processes stay, others are removed at the next start."""

import os
import subprocess
import sys
import tempfile

import pytest

from mtrl.sandbox.image_files import ImageFiles
from mtrl.sandbox.scratch import PREFIX

OWNER = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from mtrl.sandbox.scratch import ScratchDirectory
scratch = ScratchDirectory()
open(scratch.name + "/0.ppm", "w").close()
print(scratch.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_leftovers_of_a_killed_run_are_removed_at_the_next_start(place):
    """It was killed with all its workers, so nothing could remove it. The directory of a running run stays."""
    runs = [
        subprocess.Popen([sys.executable, "-c", OWNER, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    killed, living = (run.stdout.readline().decode().strip() for run in runs)
    runs[0].kill()
    runs[0].wait()
    assert os.path.exists(f"{killed}/0.ppm")
    mine = ImageFiles().directory
    assert not os.path.exists(killed) and os.path.exists(f"{living}/0.ppm") and os.path.isdir(mine.name)
    runs[1].communicate()
    assert runs[1].returncode == 0 and not os.path.exists(living)
    runs[0].stdin.close()
    runs[0].stdout.close()


def test_only_our_own_directories_are_removed(place):
    precious = place / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    (place / f"{PREFIX}link").symlink_to(precious)
    (place / f"{PREFIX}file").write_text("kept")
    (place / "mtrl-other").mkdir()
    first = ImageFiles().directory
    second = ImageFiles().directory
    assert first.name != second.name and os.path.isdir(first.name)
    assert (precious / "file").read_text() == (place / f"{PREFIX}file").read_text() == "kept"
    assert (place / f"{PREFIX}link").is_symlink() and (place / "mtrl-other").is_dir()


def test_a_directory_taken_for_abandoned_before_it_was_locked(place, monkeypatch):
    """Another start may happen between making and locking it."""
    make, made = tempfile.TemporaryDirectory, []

    def stolen(**settings):
        made.append(make(**settings))
        if len(made) == 1:
            os.rmdir(made[0].name)
        return made[-1]

    monkeypatch.setattr(tempfile, "TemporaryDirectory", stolen)
    assert ImageFiles().directory.name == made[1].name and os.path.isdir(made[1].name)
