"""The Hugging Face hub without a network."""

import socket

import pytest
from huggingface_hub import constants

from mtrl.cli import main
from mtrl.compose.task_source import open_data_sources
from mtrl.data import DataError, hub


@pytest.fixture
def no_network(monkeypatch):
    """As on a machine without one, the variable unset: the first lookup fails."""
    tries = []

    def refuse(address, timeout):
        tries.append(address)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "create_connection", refuse)
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tries


@pytest.mark.parametrize(
    "words",
    [["eval", "org/model"], ["train", "worker.actor.model.model_path=org/model", "dataset.train_files=a.jsonl"]],
)
def test_a_missing_model_is_one_line_at_once(words, no_network, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "answer": "b"}')
    assert main(words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mtrl:")]
    assert "org/model is not a checkpoint directory and not in the cache" in line
    assert "huggingface.co: Name or service not known" in line and len(no_network) == 1


@pytest.mark.parametrize("name", ["org/rows", "org/rows@test"])
def test_a_missing_dataset_is_one_line_at_once(name, no_network, monkeypatch):
    def library(item, cache):
        assert constants.HF_HUB_OFFLINE, "else it would try again and again"
        raise DataError("a long story")

    monkeypatch.setattr("mtrl.compose.task_source.open_sources", library)
    with pytest.raises(DataError, match="not in the cache of the Hugging Face hub, which cannot be reached"):
        open_data_sources(name, "train")
    assert not constants.HF_HUB_OFFLINE


def test_local_files_need_no_network(no_network, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}')
    assert len(open_data_sources("rows.jsonl", "train")[0]) == 1
    with pytest.raises(DataError, match=r"absent\.jsonl does not exist"):
        open_data_sources("absent.jsonl", "train")
    for name in (
        str(tmp_path),
        "./nowhere",
        "/nowhere",
        "a/b/c",
    ):  # the last ones are no ids, which their loader reports
        hub.check_model_available(name)
    assert no_network == []


def test_a_cached_model_is_used_and_reported(no_network, monkeypatch, caplog):
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda name, file: f"/cache/{file}")
    hub.check_model_available("org/model")
    assert constants.HF_HUB_OFFLINE and "org/model is loaded from its cache" in caplog.text


def test_the_variable_is_named_where_it_is_the_reason(no_network, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set"):
        hub.check_model_available("org/model")
    assert no_network == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "create_connection", lambda address, timeout: socket.socket())
    assert hub.connection_error() is None
