"""The command line itself: arguments, streams and signals. The effects of the commands are tested elsewhere."""

import os
import signal
import subprocess
import sys

import pytest

from mtrl.cli import main


def run(code, *, folder=None, closed=(), **streams):
    def close():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a suite in the background of a shell has it ignored
        for number in closed:
            os.close(number)

    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.run([sys.executable, "-c", code], preexec_fn=close, text=True, cwd=folder, timeout=60, **streams)


def command(*words):
    return f"import sys; from mtrl.cli import main; sys.exit(main({list(words)!r}))"


# --------------------------------------------------------------------------------------------------------------- words
@pytest.mark.parametrize(
    ("typed", "meant"),
    [("trian", "mtrl train"), ("evaluate", "mtrl eval"), ("dctor", "mtrl doctor"), ("run.yaml", "mtrl train run.yaml")],
)
def test_a_typo_gets_a_suggestion(typed, meant, capsys):
    assert main([typed]) == 2
    assert capsys.readouterr().err == f"mtrl: no command {typed!r}; did you mean {meant}?\n"


def test_an_unknown_command_lists_all_commands(capsys):
    assert main(["xyzzy"]) == 2
    assert "usage: mtrl COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["data", "\udcff.jsonl"], ["train", "training.output_dir=\udce9"]])
def test_a_path_that_is_not_utf_8_gets_one_line_with_its_name(words, capsys):
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words[1].encode(errors="backslashreplace").decode() in line and "is not UTF-8 text" in line


LONG = "x" * 300  # more than a file may be called


@pytest.mark.parametrize(
    "words",
    [
        ["compare", "a.yaml", "b.yaml", f"dataset.name={LONG}"],
        ["compare", LONG, "b.yaml"],
        ["plot", "run", LONG],
        ["eval", "zoo", "--out", LONG],
    ],
)
def test_an_argument_that_is_too_long_for_a_file_gets_an_answer(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("mtrl: ")


def test_control_characters_of_an_argument_do_not_reach_the_terminal(capsys):
    assert main(["config", "a\x1b[2J.b=1"]) == 2
    said = capsys.readouterr().err
    assert "\x1b" not in said and "a\\x1b[2J" in said


# ------------------------------------------------------------------------------------------------------------- streams
@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_closed_streams_lead_nowhere(closed, tmp_path):
    """A file opened later must not get the descriptor of a closed stream, and with it the stream's output."""
    code = "import mtrl.cli as cli, os\n"
    code += "def config(arguments):\n    kept = open('kept', 'w')\n    print('said')\n    os.write(2, b'said')\n"
    code += "    os.write(1, b'said')\n    cli.sys.stderr.write('said')\n    return 0\n"
    code += "cli.COMMANDS['config'] = config\ncli.sys.exit(cli.main(['config']))"
    done = run(code, folder=tmp_path, closed=closed)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert (tmp_path / "kept").read_text() == ""


def test_a_full_disk_behind_stdout_is_reported():
    with open("/dev/full", "w") as full:
        done = run(command("config", "--list"), stdout=full)
    assert done.returncode == 1 and done.stderr == "mtrl: stdout cannot be written: No space left on device\n"


# -------------------------------------------------------------------------------------------------------------- Ctrl-C
def test_ctrl_c_while_starting_leaves_quietly(tmp_path):
    """As in the first second of a real command: the signal meets an import, which makes another error of it."""
    (tmp_path / "slow.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    for _ in range(10**8): pass\n"
        "except KeyboardInterrupt:\n    raise ImportError('multiarray failed to import')\n"
    )
    code = "import sys; sys.path.insert(0, '.')\nimport mtrl.cli as cli\n"
    code += "def train(arguments):\n    import slow\n\ncli.COMMANDS['train'] = train\nsys.exit(cli.main(['train']))"
    done = run(code, folder=tmp_path)
    assert (done.returncode, done.stderr) == (130, "mtrl: stopped\n")


def test_ctrl_c_in_a_command_lets_it_clean_up(tmp_path):
    """A command that runs may hold something, so there it is a KeyboardInterrupt."""
    code = "import os, signal, sys, types\nimport mtrl.cli as cli\nfake = types.ModuleType('mtrl.commands.fake')\n"
    code += (
        "exec('''def run(arguments):\n    import os, signal\n    try:\n        os.kill(os.getpid(), signal.SIGINT)\n"
    )
    code += "        for _ in range(10**8): pass\n    finally:\n        print('clean')\n''', fake.__dict__)\n"
    code += "cli.COMMANDS['train'] = lambda arguments: fake.run(arguments)\nsys.exit(cli.main(['train']))"
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "clean\n", "mtrl: stopped\n")
