"""The door to the terminal."""

import io
import os
import subprocess
import sys

import pytest
from tqdm import tqdm

from mtrl.tracking.colour import wants_colour
from mtrl.utils.terminal import SanitizedStream, sanitize, separate_log, unwrap_stream


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_printed_text_cannot_move_the_cursor(stream):
    behind = stream()
    print("row\x1b[31m 1", "\r\x1b[A\x9b2J", "\udcff.png", file=SanitizedStream(behind))
    print("\x1b[A", "\x1b]0;title\x07", file=SanitizedStream(behind))
    assert behind.getvalue().splitlines()[0] == "row\\x1b[31m 1 \\r\\x1b[A\\x9b2J \\udcff.png"
    assert "\x1b]" not in behind.getvalue() and "\x07" not in behind.getvalue()
    assert unwrap_stream(SanitizedStream(behind)) is behind and unwrap_stream(behind) is behind


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_a_bar_may_return_to_its_beginning(stream):
    behind = stream()
    door = SanitizedStream(behind)
    with tqdm(total=2, file=door, position=1, desc="rows\x1b[2J") as bar:
        bar.update(1)
    assert "\rrows\\x1b[2J:" in behind.getvalue() and "\x1b[2J" not in behind.getvalue()
    assert "\x1b[A" in behind.getvalue(), "one bar below another"


def test_libraries_write_no_colours_that_would_be_escaped(monkeypatch):
    """wandb and click ask whether it is a terminal; tqdm may draw its bar on one."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr("wandb.errors.term._silent", False)  # other tests silence it
    behind = Terminal()
    monkeypatch.setattr(sys, "stderr", SanitizedStream(behind))
    wandb.termlog("one")
    wandb.termwarn("two")
    assert behind.getvalue() == "wandb: one\nwandb: WARNING two\n"
    with tqdm(total=1, file=sys.stderr, disable=None) as bar:
        bar.update(1)
    assert "100%" in behind.getvalue() and wants_colour(sys.stderr)


def test_readable_text_stays():
    assert sanitize("选 ×\u200d é\n") == "选 ×\u200d é\n"


def separate(stdout, stderr):
    code = "import sys; from mtrl.utils.terminal import separate_log; log = separate_log()\n"
    code += "print('other' if log is None else 'own', file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], stdout=stdout, stderr=stderr)
    assert done.returncode == 0


def test_a_redirected_stdout_is_a_separate_log(tmp_path):
    files = tmp_path / "out", tmp_path / "err", tmp_path / "both"
    with open(files[0], "w") as out, open(files[1], "w") as err, open(files[2], "w") as both:
        separate(out, err)
        separate(both, both)
        separate(both, subprocess.STDOUT)
    assert [file.read_text() for file in files] == ["", "own\n", "other\nother\n"]
    first, second = os.openpty()
    with open(files[1], "w") as err:
        separate(second, err)
    os.close(first), os.close(second)
    assert files[1].read_text() == "other\n"


def test_a_stream_that_somebody_replaced_is_no_log(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert separate_log() is None
