"""Words and files that no command expects: each gets one clear line and an exit status, and never a traceback."""

import json
from pathlib import Path

import pytest
from run_helpers import bound_by_permissions, get_run_dir, tiny_arguments

from mtrl.checkpoint.folder_store import list_checkpoints
from mtrl.cli import main
from mtrl.compose.run import build, configure
from mtrl.embedded.embedded_rows import MODEL_DIRECTORY
from mtrl.utils.errors import StartError

ZOO = str(MODEL_DIRECTORY)


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        (["data", "folder"], "folder holds no .jsonl or .parquet file"),
        (["data", "empty.jsonl"], "empty.jsonl holds no row"),
        (["data", "locked.jsonl"], "locked.jsonl cannot be read"),
        (["data", "locked"], "locked/dataset_dict.json cannot be used: Permission denied"),
        (["data", "zoo@tset"], "no split 'tset'; it has train, validation, test"),
        (["data", "zoo@test", "dataset.seed"], "dataset.seed: not an override"),
        (["eval", "folder"], "folder is no checkpoint directory"),
        (["eval", "empty.jsonl"], "empty.jsonl is no checkpoint directory"),
        (["eval", "locked"], "locked/config.yaml cannot be used: Permission denied"),
        (["eval", "forbidden"], "forbidden/checkpoints cannot be used: Permission denied"),
        (["eval", ZOO, "--data"], "--data: expected one argument"),
        (["eval", ZOO, "--data", "--samples"], "--data: expected one argument"),
        (["eval", ZOO, "--data", "a.jsonl", "--data", "b.jsonl"], "--data: given 2 times, keep one"),
        (["eval", ZOO, "--data=no such file.jsonl"], "no such file.jsonl does not exist"),
        (["eval", ZOO, "--data", "empty.jsonl"], "empty.jsonl holds no row"),
        (["attention", "locked"], "locked/config.yaml cannot be used: Permission denied"),
        (["attention", ZOO, "--out", "empty.jsonl"], "cannot be written to empty.jsonl; name a directory"),
        (["attention", ZOO, "--samples=2", "--samples=3"], "--samples: given 2 times"),
        (["attention", ZOO, "--out", ""], "--out: expected one argument"),
        (["train", "locked.yaml"], "locked.yaml: cannot read the file: Permission denied"),
        (["train", "folder"], "folder: cannot read the file: Is a directory"),
        (["train", "dataset.seed"], "dataset.seed: not an override; write key=value"),
        (["train", "training.load_checkpoint_path=locked"], "locked/checkpoints cannot be used: Permission denied"),
        (["train", "training.load_checkpoint_path=forbidden"], "forbidden/checkpoints cannot be used"),
        (["doctor", "locked.yaml"], "locked.yaml: cannot read the file"),
        (["doctor", "dataset.seed"], "dataset.seed: not an override"),
    ],
)
def test_odd_arguments_get_one_clear_line(typed, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.jsonl").touch()
    for name in ("locked.jsonl", "locked.yaml"):
        (tmp_path / name).touch(mode=0)
    (tmp_path / "locked").mkdir(mode=0)
    (tmp_path / "forbidden" / "checkpoints").mkdir(parents=True)
    (tmp_path / "forbidden" / "config.yaml").touch()
    (tmp_path / "forbidden" / "checkpoints").chmod(0)
    with bound_by_permissions():
        assert main(typed) == 2
    *before, last = capsys.readouterr().err.strip().splitlines()
    before = [line for line in before if not line.startswith("checking ")]  # progress, on a slow machine
    assert named in last and len(before) <= 1


@pytest.mark.parametrize("command", [["data"], ["reward", "my reward.py", "--data"]], ids=["data", "reward"])
def test_a_path_may_have_spaces(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my reward.py").write_text("def reward_function(data):\n    return 1.0\n")
    (tmp_path / "my data.jsonl").write_text(json.dumps({"prompt": "why?", "answer": "A"}))
    assert main([*command, "my data.jsonl"]) == 0
    assert "my data.jsonl" in capsys.readouterr().out


def test_doctor_reports_an_output_folder_that_is_a_file(tmp_path, capsys, fake_passes):
    (tmp_path / "file").touch()
    assert main(["doctor", f"training.output_dir={tmp_path / 'file'}"]) == 2
    assert f"training.output_dir: {tmp_path / 'file'} cannot be written to" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------- a run that may not be read
@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    """The output folder of a run of one step."""
    output = tmp_path_factory.mktemp("output")
    assert main(tiny_arguments(output, "training.max_steps=1", "training.val_before_train=false")) == 0
    return output


@pytest.mark.parametrize("locked", ["checkpoints", "checkpoints/step_1/config.json", "metrics.jsonl", "run.lock"])
def test_a_run_that_may_not_be_read_does_not_start(output, locked, capsys):
    """Neither from the command line nor from Python, and above all not from the beginning."""
    place, command = get_run_dir(output) / locked, tiny_arguments(output, "training.max_steps=2")
    mode = place.stat().st_mode
    place.chmod(0)
    try:
        with bound_by_permissions():
            assert main(command) == 2
            with pytest.raises(StartError, match="Permission denied"):
                build(configure(None, command[1:])[0])
    finally:
        place.chmod(mode)
    *_, said = capsys.readouterr().err.strip().splitlines()
    assert said.startswith("mtrl: ") and "Permission denied" in said
    assert [path.name for path in list_checkpoints(get_run_dir(output) / "checkpoints")] == ["step_1"]
