"""Real runs that an error ends, or whose images are damaged: saved, and resumed bitwise."""

import json
import shutil
from pathlib import Path

import pytest
from run_helpers import read_metrics, same_end, tiny_run_files, tiny_settings

from mtrl.compose.run import build, configure
from mtrl.data.sampler import epoch_order
from mtrl.protocols import Tracker
from mtrl.training.resumable_run import Run
from mtrl.utils.errors import Diverged, RunError

ROWS, STEPS, BATCH, SEED = 6, 4, 2, 42
ORDER = epoch_order(ROWS, SEED, 0).tolist()


@pytest.fixture(autouse=True, scope="module")
def damage_shows_late():
    """The scan decodes no image, so that a run starts with images whose damage is not in the header."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtrl.data.dataset.SAMPLED_ROWS", 0)
        yield


def damage(index: int, folder: Path) -> None:
    """Overwrites the pixels of an image file and keeps its header and end."""
    path = folder / f"{index}.png"
    data = bytearray(path.read_bytes())
    data[60:-12] = b"\0" * (len(data) - 72)
    path.write_bytes(bytes(data))


def write_data(folder: Path, damaged: list[int]) -> None:
    """The first questions of the tiny run, with their pictures in files."""
    folder.mkdir()
    for index in range(ROWS):
        shutil.copy(tiny_run_files() / f"{index}.png", folder)
    for index in damaged:
        damage(index, folder)
    rows = (tiny_run_files() / "train.jsonl").read_text().splitlines()
    (folder / "train.jsonl").write_text("\n".join(rows[:ROWS]))


class Breaking(Tracker):
    """A logger that fails after a step."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def rollouts(self, step, experience):
        if step == self.step:
            raise ConnectionError("the logger's server is gone")


def run_in(folder: Path, breaks_at: int | None = None, on_bad_row: str = "scan") -> Run:
    overrides = [*tiny_settings(), f"dataset.train_files={folder / 'data' / 'train.jsonl'}",
                 f"dataset.rollout_batch_size={BATCH}", f"dataset.seed={SEED}",
                 f"training.output_dir={folder}", f"training.max_steps={STEPS}",
                 "training.val_freq=-1", "training.val_before_train=false", "training.save_freq=-1",
                 "dataset.val_files=", f"dataset.on_bad_row={on_bad_row}"]  # fmt: skip
    return build(configure(None, overrides)[0], trackers=[Breaking(breaks_at)])


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of a run with one damaged image, the second that it reads."""
    folder = tmp_path_factory.mktemp("whole")
    write_data(folder / "data", [ORDER[1]])
    run = run_in(folder)
    run.train()
    return run.directory


def test_a_damaged_image_is_skipped_replaced_and_counted(whole):
    rows = read_metrics(whole)
    assert [rows[step, False]["data/skipped_rows"] for step in range(1, STEPS + 1)] == [1] * STEPS
    source = json.loads((whole / "checkpoints" / f"step_{STEPS}" / "trainer_state.json").read_text())["source"]
    assert source["skipped"] == [ORDER[1]]
    assert source["epoch"] * ROWS + source["position"] > STEPS * BATCH, "another row stood in"
    assert "is truncated or damaged" in (whole / "bad_rows.jsonl").read_text()


def test_an_error_ends_saved_and_the_same_command_resumes_bitwise(whole, tmp_path, capfd):
    write_data(tmp_path / "data", [ORDER[1]])
    with pytest.raises(ConnectionError, match="server is gone"):
        run_in(tmp_path, breaks_at=3).train()
    assert "saved after step 3" in capfd.readouterr().err
    (tmp_path / "data" / f"{ORDER[1]}.png").unlink()  # now the scan sees it too, and lets it pass: the run has begun
    again = run_in(tmp_path)
    assert again.start.step == 3
    again.train()
    same_end(whole, again.directory, STEPS)


def test_many_bad_rows_end_the_run_saved_and_it_resumes_without_them(tmp_path, capfd):
    write_data(tmp_path / "data", [ORDER[0], ORDER[4]])
    with pytest.raises(RunError, match=r"2 of the 6 rows drawn so far could not be read.*on_bad_row=skip"):
        run_in(tmp_path).train()
    assert "saved after step 1" in capfd.readouterr().err
    (tmp_path / "data" / f"{ORDER[0]}.png").unlink()
    again = run_in(tmp_path, on_bad_row="skip")
    assert again.start.step == 1
    again.train()
    assert again.loop.done == STEPS


def test_weights_that_have_diverged_are_not_saved(tmp_path, monkeypatch):
    """They would be the newest checkpoint, and the same command would resume from them."""
    write_data(tmp_path / "data", [])
    run = run_in(tmp_path)
    collect = run.loop.collect

    def diverge(step):
        if step == 2:
            raise Diverged("the logits are NaN")
        return collect(step)

    monkeypatch.setattr(run.loop, "collect", diverge)
    with pytest.raises(Diverged):
        run.train()
    assert run.loop.done == 2 and not list((run.directory / "checkpoints").glob("step_*"))
