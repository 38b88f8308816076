"""One core, and the same hypothesis examples on every run, so that failures are reproducible."""

import gc
import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: tests must not use the network

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
    """Freezes the objects imported so far: later garbage collections need not scan them."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # otherwise extensions report leaks at exit


@pytest.fixture
def few_rows(monkeypatch):
    """The embedded training set with only 64 rows, since a run reads all of them before its first step."""
    from mtrl.embedded.embedded_rows import SIZES

    monkeypatch.setitem(SIZES, "train", 64)


@pytest.fixture(scope="module")
def no_curves():
    """Runs do not draw their curves, which would take as long as the steps of a tiny model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtrl.tracking.curve.draw_runs", lambda *arguments: None)
        yield


MEASURED: dict[tuple[str, ...], Any] = {}


@pytest.fixture
def remembered_passes(monkeypatch):
    """Caches the memory estimate of each model and plan for this process: the passes of `mtrl doctor` on fake tensors
    take seconds, and these tests do not test them."""
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
    """A bf16 product that the CPU does not support makes torch disable oneDNN for the rest of the process. Later tests
    would then differ in the last bits from other processes, so this enables it again."""
    yield
    if not torch.backends.mkldnn.enabled:
        torch.backends.mkldnn.set_flags(True)
