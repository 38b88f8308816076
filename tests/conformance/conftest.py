"""Runs of these tests end without their picture, which takes as long as the steps of a tiny model."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_curves():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtrl.tracking.curve.draw_runs", lambda *arguments: None)
        yield
