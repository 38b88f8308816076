"""Loggers: real ones written and read back, and ones that fail and never stop a run."""

import json
import logging
import threading
from pathlib import Path

import pytest
from view_helpers import make_step

from mtrl.compose.trackers import build_trackers
from mtrl.config import load_config
from mtrl.config.unsupported import LOGGERS, find_missing_libraries
from mtrl.tracking import feed as feeds
from mtrl.tracking.feed import LoggerFeed, RunInfo
from mtrl.tracking.sinks import SINKS, as_markdown, get_run_id
from mtrl.types import ValidationSample

SAMPLE = ValidationSample("a:1", "Which colour?\n# no heading", "red", "B", 0.5)


def about(directory, first_step=1):
    return RunInfo("project", "name", directory, {"dataset.seed": 7}, first_step)


class Memory:
    """A logger that remembers, and fails while `fails` is set."""

    def __init__(self):
        self.got, self.fails, self.closed = [], False, False

    def metrics(self, step, values):
        if self.fails:
            raise ConnectionError("the server is gone")
        self.got.append((step, values))

    def responses(self, step, shown):
        self.metrics(step, [each.kind for each in shown])

    def close(self):
        self.closed = True


def wait(feed):
    """Waits until the feed's thread has finished its work."""
    done = threading.Event()
    feed._background.submit(done.set)
    assert done.wait(10)


# ------------------------------------------------------------------------------------------------------------ the feed
def test_everything_arrives_in_order_and_samples_with_a_validation():
    memory = Memory()
    feed = LoggerFeed("memory", lambda: memory)
    feed.metrics(1, {"loss": 1.0, "nan": float("nan")})
    feed.rollouts(1, make_step())
    feed.validation(1, {"val/reward_score": 0.5}, {"kind": {"shape": 0.25}}, [SAMPLE])
    feed.close()
    assert memory.got == [
        (1, {"loss": 1.0}),
        (1, {"val/reward_score": 0.5, "val/by_kind/shape": 0.25}),
        (1, ["val", "train", "train", "train"]),
    ]
    assert memory.closed


def test_a_logger_that_loses_its_server_catches_up(caplog):
    memory = Memory()
    feed = LoggerFeed("memory", lambda: memory)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 7):
            memory.fails = step in (2, 3, 4)
            feed.metrics(step, {"loss": float(step)})
            wait(feed)
        feed.close()
    assert [step for step, _ in memory.got] == [1, 2, 3, 4, 5, 6]
    assert caplog.text.count("fails (ConnectionError: the server is gone)") == 1 and "works again" in caplog.text


def test_losses_are_reported(caplog, monkeypatch):
    def refuse():
        raise RuntimeError("no account")

    monkeypatch.setattr(feeds, "WAITING", 3)
    feed = LoggerFeed("memory", refuse)
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            feed.metrics(step, {"loss": 1.0})
            wait(feed)
        feed.close()
    assert "logger memory: 5 entries are lost; metrics.jsonl has every number" in caplog.text


def test_a_late_logger_gets_earlier_rows():
    memory, tries = Memory(), []

    def slow_start():
        tries.append(1)
        if len(tries) < 3:
            raise TimeoutError
        return memory

    feed = LoggerFeed("memory", slow_start)
    for step in (1, 2, 3):
        feed.metrics(step, {"loss": 1.0})
        wait(feed)
    feed.close()
    assert [step for step, _ in memory.got] == [1, 2, 3]


# ------------------------------------------------------------------------------------------------------------ real ones
def test_tensorboard_written_and_read_back(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, value in ((1, 1.0), (3, 9.0)):  # the second attempt resumes after step 2
        feed = LoggerFeed("tensorboard", lambda first=first: SINKS["tensorboard"](about(tmp_path, first)))
        for step in range(first, 5):
            feed.metrics(step, {"reward/overall": value + step})
        feed.rollouts(4, make_step())
        feed.validation(4, {"val/reward_score": 0.5}, {}, [SAMPLE])
        feed.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0, "images": 0})
    read.Reload()
    points = [(event.step, event.value) for event in read.Scalars("reward/overall")]
    assert points == [(1, 2.0), (2, 3.0), (3, 12.0), (4, 13.0)], "repeated steps replace the undone ones"
    assert "val/reward_score" in read.Tags()["scalars"] and any(
        tag.startswith("train/") for tag in read.Tags()["images"]
    )
    text = read.Tensors("val/0/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "    # no heading" in text and "reward 0.5, answer B" in text
    assert "dataset.seed: 7" in read.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()


def test_wandb_offline_written_and_read_back(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for first in (1, 3):
        feed = LoggerFeed("wandb", lambda first=first: SINKS["wandb"](about(tmp_path, first)))
        feed.metrics(first, {"reward/overall": 0.25})
        feed.rollouts(first, make_step())
        feed.validation(first, {"val/reward_score": 0.5}, {}, [SAMPLE])
        feed.close()
        ids.append(json.loads((tmp_path / "loggers.json").read_text())["wandb"])
    assert ids[0] == ids[1], "a resumed run continues the same run"
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert files and all(ids[0] in file.name for file in files)
    data = b"".join(file.read_bytes() for file in files)
    assert b"reward/overall" in data and b"val/reward_score" in data and b"dataset.seed" in data
    (table,) = (tmp_path / "wandb").glob(f"{files[0].parent.name}/files/media/table/*.json")
    assert ["val", "a:1", "Which colour?\n# no heading", "red", "B", 0.5] in json.loads(table.read_text())["data"]
    assert len(list(files[0].parent.rglob("*.png"))) == 2, "two pictures, one of them shown twice"


@pytest.mark.slow  # 2 s
def test_wandb_without_its_server_is_offline_after_a_short_wait(tmp_path, monkeypatch, caplog):
    wandb = pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_INIT_TIMEOUT", raising=False)
    monkeypatch.delenv("WANDB_SILENT", raising=False)
    for name, value in (("API_KEY", "a" * 40), ("BASE_URL", "http://127.0.0.1:9")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()  # it has read the environment of an earlier test
    asked = []
    monkeypatch.setattr("wandb.apis.public.service_api.ServiceApi.authenticate", asked.append)
    init, timeouts = wandb.init, []

    def init_quickly(**options):
        timeouts.append(options["settings"].init_timeout)
        if len(timeouts) == 1:  # the offline start needs seconds on a busy machine
            options["settings"].init_timeout = 1
        return init(**options)

    monkeypatch.setattr(wandb, "init", init_quickly)
    feed = LoggerFeed("wandb", lambda: SINKS["wandb"](about(tmp_path, 1)))
    feed.metrics(1, {"reward/overall": 0.25})
    feed.close()
    (line,) = [record.message for record in caplog.records if record.name.startswith("mtrl.")]
    assert timeouts == [15, 15] and line.startswith("wandb cannot be reached")
    assert not asked, "the user's name would take up to 10 seconds more"
    wandb.teardown()  # the file is complete when wandb's service has ended, as at the end of a run
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert (
        b"reward/overall" in file.read_bytes()
        and json.loads((tmp_path / "loggers.json").read_text())["wandb"] in file.name
    )


def test_mlflow_written_and_read_back(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for first in (1, 3):
        feed = LoggerFeed("mlflow", lambda first=first: SINKS["mlflow"](about(tmp_path, first)))
        feed.metrics(first, {"reward/overall": 0.25 * first})
        feed.rollouts(first, make_step())
        feed.validation(first, {"val/avg@1": 0.5}, {}, [SAMPLE])
        feed.close()
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    assert run.info.run_name == "name" and run.info.status == "FINISHED" and run.data.params == {"dataset.seed": "7"}
    points = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "reward/overall")]
    assert points == [(1, 0.25), (3, 0.75)], "both attempts in one run"
    assert run.data.metrics["val/avg_1"] == 0.5
    files = {file.path for file in client.list_artifacts(run.info.run_id, "responses")}
    assert {"responses/step_1.md", "responses/step_3.md", "responses/step_1_1.png"} <= files


@pytest.mark.slow  # 3 s
def test_swanlab_offline_written_and_read_back(tmp_path, monkeypatch):
    pytest.importorskip("swanlab")
    for name in ("SWANLAB_MODE", "SWANLAB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for first in (1, 3):
        feed = LoggerFeed("swanlab", lambda first=first: SINKS["swanlab"](about(tmp_path, first)))
        feed.metrics(first, {"reward/overall": 0.25})
        feed.rollouts(first, make_step())
        feed.validation(first, {"val/reward_score": 0.5}, {}, [SAMPLE])
        feed.close()
    name = json.loads((tmp_path / "loggers.json").read_text())["swanlab"]
    files = sorted((tmp_path / "swanlab").glob(f"run-*-{name}/run-{name}.swanlab"))
    assert files, "both attempts under one id"
    data = b"".join(file.read_bytes() for file in files)
    assert b"reward/overall" in data and b"val/reward_score" in data
    texts = "".join(file.read_text() for file in files[0].parent.glob("media/text/*.txt"))
    assert "    # no heading" in texts and list(files[0].parent.glob("media/image/*.png"))
    assert "dataset.seed" in (files[0].parent / "files/config.yaml").read_text()


def test_trackio_written_and_read_back(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    place = trackio.utils.TRACKIO_DIR  # the directory that was set when it was imported
    for first in (1, 3):
        feed = LoggerFeed("trackio", lambda first=first: SINKS["trackio"](about(tmp_path, first)))
        feed.metrics(first, {"reward/overall": 0.25 * first})
        feed.rollouts(first, make_step())
        feed.validation(first, {"val/avg@1": 0.5}, {}, [SAMPLE])
        feed.close()
    name = json.loads((tmp_path / "loggers.json").read_text())["trackio"]
    (run,) = [run for run in trackio.Api().runs("project") if run.name == name]
    assert name.startswith("name-") and run.config["dataset.seed"] == 7
    rows = trackio.sqlite_storage.SQLiteStorage.get_logs("project", name)
    points = {row["step"]: row["reward/overall"] for row in rows if "reward/overall" in row}
    assert points == {1: 0.25, 3: 0.75} and any(row.get("val/avg@1") == 0.5 for row in rows), "both attempts in one run"
    (table, _) = [row["responses"]["_value"] for row in rows if "responses" in row]
    assert "    # no heading" in table[0]["response"] and table[0]["kind"] == "val"
    pictures = [place / "media" / row["image"]["file_path"] for row in table if row["image"]]
    assert pictures and all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    assert capsys.readouterr().out == "", "the console stays the run's"


# ------------------------------------------------------------------------------------------------------------ the house
def test_every_logger_that_is_built_has_a_sink():
    assert ("console", *SINKS) == LOGGERS


def test_a_logger_that_is_not_installed_is_reported_at_the_start(monkeypatch):
    monkeypatch.setattr("mtrl.config.unsupported.find_spec", lambda name: None if name == "wandb" else name)
    config = load_config(None, {"training.logger": ("console", "wandb", "tensorboard")})
    assert find_missing_libraries(config) == ["training.logger: wandb is not installed; pip install wandb"]


def test_several_loggers(tmp_path):
    class Encoder:
        image_settings = None
        decode = decode_tokens = pictures = staticmethod(lambda ids: "")

    config = load_config(None, {"training.logger": ("tensorboard", "wandb")})
    trackers = build_trackers(config, 1, Encoder(), tmp_path)
    assert [each.name for each in trackers if isinstance(each, LoggerFeed)] == ["tensorboard", "wandb"]
    for each in trackers:
        each.close()
    assert not (tmp_path / "wandb").exists(), "without data nothing is started"


def test_ids_survive_damage(tmp_path):
    first = get_run_id(tmp_path, "wandb")
    assert get_run_id(tmp_path, "wandb") == first and get_run_id(tmp_path, "other") != first
    Path(tmp_path / "loggers.json").write_text("[broken")
    assert isinstance(get_run_id(tmp_path, "wandb"), str)


def test_texts_are_no_markup():
    shown = feeds.make_validation_sample(ValidationSample("<b>", "![x](http://evil)", "<script>", None, 1.0))
    assert all(line.startswith("    ") for line in as_markdown(shown).split("\n"))
