"""The directory of compiled kernels: the user's cache, unless the user has set one."""

import logging
import tempfile
from pathlib import Path

import pytest
from torch._inductor.runtime import cache_dir_utils as of_torch

from mtrl.models.compile_cache import INDUCTOR, TRITON, set_compile_cache


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """The environment of a new process; changes are undone afterwards."""
    for name in (INDUCTOR, TRITON):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("imported", [False, True])
def test_torch_stores_them_there(tmp_path, imported, monkeypatch):
    """Also where torch, on its import, has written its own choice into the environment."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if imported:
        assert Path(of_torch.cache_dir()).parent == tmp_path
    place = tmp_path / "cache" / "compiled"
    assert set_compile_cache(place) == place and place.is_dir() and not [*place.iterdir()]
    assert of_torch.cache_dir() == str(place) and of_torch.triton_cache_dir(0) == str(place / "triton")
    assert set_compile_cache(tmp_path / "other") == place, "the first one stays"


def test_settings_of_the_user_stay(tmp_path, monkeypatch):
    monkeypatch.setenv(TRITON, "theirs")
    set_compile_cache(tmp_path / "a")
    assert of_torch.triton_cache_dir(0) == "theirs"
    monkeypatch.setenv(INDUCTOR, str(tmp_path / "mine"))
    assert set_compile_cache(tmp_path / "b") == tmp_path / "mine" and not (tmp_path / "b").exists()
    assert of_torch.cache_dir() == str(tmp_path / "mine")


def test_a_directory_that_cannot_be_written_is_reported(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert set_compile_cache(tmp_path / "file" / "compiled") == Path(tempfile.gettempdir())
    assert "cannot be stored in" in caplog.text and "MTRL_CACHE" in caplog.text
    assert Path(of_torch.cache_dir()).parent == Path(tempfile.gettempdir()), "torch uses its own default"
