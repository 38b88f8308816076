"""`mtrl config` as a user meets it: streams and exit status."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

import mtrl
from mtrl.cli import COMMANDS, main
from mtrl.config import Config, load_config, to_yaml


def test_config_prints_yaml_that_loads_again(tmp_path, capsys):
    run = tmp_path / "lr=1" / "run.yaml"  # a path with `=` is still a path
    run.parent.mkdir()
    run.write_text("dataset: {seed: 3}\n")
    words = ["config", str(run), "worker.actor.optim.lr=5e-7", "--training.logger", "[console, wandb]"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    saved = tmp_path / "saved.yaml"
    saved.write_text(out)
    config = load_config(saved)
    assert (config.dataset.seed, config.worker.actor.optim.lr) == (3, 5e-7)
    assert config.training.logger == ("console", "wandb")


@pytest.mark.parametrize("order", [("{file}", "--dataset.seed", "4"), ("--dataset.seed", "4", "{file}")])
def test_the_file_may_be_at_any_position(order, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("dataset: {seed: 3, shuffle: false}\n")
    assert main(["config", *(word.format(file=path) for word in order)]) == 0
    out = capsys.readouterr().out
    assert "seed: 4\n" in out and "shuffle: false\n" in out


@pytest.mark.parametrize(
    "words", [["config={file}"], ["--config", "{file}"], ["dataset.shuffle=true", "--config={file}"]]
)
def test_config_equals_file_names_the_file(words, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("dataset: {seed: 3}\n")
    assert main(["config", *(word.format(file=path) for word in words)]) == 0
    assert "seed: 3\n" in capsys.readouterr().out


def test_without_a_file_the_defaults_are_printed(capsys):
    assert main(["config"]) == 0
    assert capsys.readouterr().out == to_yaml(Config())


def test_errors_go_to_stderr_with_status_2_and_no_traceback():
    words = [sys.executable, "-m", "mtrl", "config", "dataset.sed=1", "optimization.gamma=3"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "mtrl: 2 errors in the configuration:",
        "  command line: dataset.sed: unknown key; did you mean dataset.seed?",
        "  command line: optimization.gamma: expected a number in [0, 1], got 3",
    ]


def test_two_files_are_one_too_many(tmp_path, capsys):
    (tmp_path / "a.yaml").touch()
    assert main(["config", str(tmp_path / "a.yaml"), "b.yaml"]) == 2
    assert "b.yaml: not an override" in capsys.readouterr().err


def test_a_key_without_its_value_is_no_file(capsys):
    assert main(["config", "dataset.seed"]) == 2
    assert "dataset.seed: not an override; write key=value" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_gets_no_traceback():
    """As `mtrl config | head -1` leaves it."""
    command = [sys.executable, "-m", "mtrl.cli", "config"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (141, b"")


def test_warnings_stay_out_of_the_yaml(capsys):
    assert main(["config", "worker.rollout.val.n=4"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("warning: worker.rollout.val.n = 4") and "warning" not in out


def test_help_lists_the_commands_that_exist_and_no_other(capsys):
    assert main(["--help"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert listed == list(COMMANDS)
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        assert f"mtrl {name}" in capsys.readouterr().out


def test_version_and_unknown_commands(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mtrl {version('mtrl')}\n"
    assert main(["trian"]) == 2
    assert "no command 'trian'" in capsys.readouterr().err


def test_the_module_of_the_command_line_is_runnable():
    done = subprocess.run([sys.executable, "-m", "mtrl.cli", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"mtrl {version('mtrl')}\n")


def test_a_checkout_that_is_not_installed_has_a_version(monkeypatch):
    def no_metadata(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("mtrl.utils.package_version.version", no_metadata)
    assert mtrl.__version__ == "not installed"
