"""One core, and the same hypothesis examples on every run, so that failures are reproducible."""

import atexit
import gc
import os
import sys

gc.disable()  # until all tests are collected: imports leave little garbage, and many objects to scan for it
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: tests must not use the network

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402
from pairwise import pytest_addoption, pytest_collection_modifyitems, pytest_configure  # noqa: E402, F401

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: kernels run in numpy, on tiny shapes
settings.register_profile("mtrl", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("mtrl")


# like qwen2_5_vl and qwen3_5 but for details, and for masks, which have tests of their own; `make test-all` runs them
SLOW_FAMILIES = ("qwen2_vl", "qwen3_5_moe", "gemma3", "gemma3_text")
OF_MASKS = ("test_mask_rules.py", "test_undescribed.py", "test_tiles.py", "test_decode_families.py")


def pytest_itemcollected(item):
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    is_slow = any(isinstance(value, str) and value in SLOW_FAMILIES for value in values)
    if is_slow and item.path.name not in OF_MASKS:
        item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """Watches the metrics of all runs, and freezes the objects imported so far: later garbage collections need not scan
    them."""
    if "mtrl.compose.run" in sys.modules:  # in the whole suite it is; a few tests alone may need none of it
        from metric_watch import watch_runs

        watch_runs(sys.modules["mtrl.compose.run"])
    if "transformers" in sys.modules:
        # It formats every configuration that it reads for a log line that nobody sees: a third of a tiny run's time.
        sys.modules["transformers"].PreTrainedConfig.__repr__ = object.__repr__
    gc.collect()
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # otherwise extensions report leaks; not earlier, since pytest collects at its end


@pytest.fixture(scope="module")
def little_garbage():
    """For tests in which an engine collects garbage many times: it need not scan what earlier tests have left."""
    gc.collect()
    gc.freeze()


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


@pytest.fixture
def fake_passes(monkeypatch):
    """Memory estimates without their passes on fake tensors, which take seconds: every moment holds 1 MiB. For tests of
    `mtrl doctor` that do not test the estimate."""
    from mtrl.memory import estimate  # not at the top: a test that needs no model loads none

    phases = ("sample", "probe", "first", "second")
    moments = {phase: dict.fromkeys(estimate.MOMENTS, estimate.MIB) for phase in phases}
    monkeypatch.setattr(estimate, "measure", lambda fake, plan, wanted=estimate.PHASES: (moments, "not measured"))


@pytest.fixture(autouse=True)
def same_products():
    """A bf16 product that the CPU does not support makes torch disable oneDNN for the rest of the process. Later tests
    would then differ in the last bits from other processes, so this enables it again."""
    yield
    if not torch.backends.mkldnn.enabled:
        torch.backends.mkldnn.set_flags(True)
