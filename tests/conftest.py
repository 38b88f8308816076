"""One core, and the same hypothesis examples on every run: a failure here is a failure everywhere."""

import gc
import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: no test may wait for the network

import pytest
import torch
from hypothesis import settings
from pairwise import pytest_addoption, pytest_collection_modifyitems, pytest_configure  # noqa: F401

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: kernels run in numpy, on tiny shapes
settings.register_profile("mtrl", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("mtrl")


def pytest_collection_finish():
    """Everything imported so far stays: later garbage collections, which some code asks for, need not look at it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # or extensions report leaks at the end


@pytest.fixture
def few_rows(monkeypatch):
    """The embedded training set with 64 rows: a run reads all of them before its first step."""
    from mtrl.embedded.embedded_rows import SIZES

    monkeypatch.setitem(SIZES, "train", 64)


@pytest.fixture(scope="module")
def no_curves():
    """Runs end without their picture, which takes as long as the steps of a tiny model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtrl.tracking.curve.draw_runs", lambda *arguments: None)
        yield


MEASURED: dict[tuple[str, ...], Any] = {}


@pytest.fixture
def remembered_passes(monkeypatch):
    """`mtrl doctor` counts the memory of each model and plan once in this process: its passes on fake tensors take
    seconds, and are not what these tests are about."""
    from mtrl.memory import estimate  # not at the top: a test that needs no model loads none

    measure = estimate.measure

    def remembered(fake, plan, wanted=estimate.PHASES):
        key = (fake.model.config.to_json_string(), repr(plan), *wanted)
        if key not in MEASURED:
            MEASURED[key] = measure(fake, plan, wanted)
        return MEASURED[key]

    monkeypatch.setattr(estimate, "measure", remembered)


@pytest.fixture(autouse=True)
def same_products():
    """A product in bf16 that a processor cannot do makes torch leave oneDNN for good, in this process: what runs after
    it would differ in its last bits from what other processes compute."""
    yield
    if not torch.backends.mkldnn.enabled:
        torch.backends.mkldnn.set_flags(True)
