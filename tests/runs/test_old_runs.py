"""A run made by version 0.1.0 (commit 3bb07fb) still opens: it resumes to the numbers it would have had, and its files
are read by the viewer.

The archive holds a run of three steps without its last checkpoint: actor, critic, synced reference, replay buffer and
responses sampled one step ahead, for a model of 35,000 parameters.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from mtrl.cli import main

ARCHIVE = Path(__file__).parent.parent / "data" / "run_3bb07fb.tar.xz"
NOT_COMPARED = ("perf/", "time", "attempt")


@pytest.fixture(scope="module")
def old_run(tmp_path_factory):
    home = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(home, filter="data")
    root = home / "run_3bb07fb"
    config = root / "outputs/old/run/config.yaml"
    config.write_text(config.read_text().replace("@HERE@", str(root)))
    return root


def test_resumes_to_the_same_numbers(old_run, monkeypatch):
    monkeypatch.chdir(old_run)
    main(["train", "run.yaml"])
    rows = [json.loads(line) for line in (old_run / "outputs/old/run/metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["step"] == 3]
    before, after = ([row for row in last if row["attempt"] == attempt] for attempt in (1, 2))
    assert len(before) == len(after) == 2
    for old, new in zip(before, after, strict=True):
        compared = {name: value for name, value in old.items() if not name.startswith(NOT_COMPARED)}
        assert len(compared) > 20
        assert {name: new.get(name) for name in compared} == pytest.approx(compared, rel=1e-4, abs=1e-6)
