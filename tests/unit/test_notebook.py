"""Progress in a notebook's cell: numbers, curves, a resumed run; and where it is shown."""

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

from mtrl.tracking import notebook
from mtrl.tracking.notebook import NotebookProgress, find_shell

STEP = {"perf/seconds_step": 1.0, "reward/overall": 0.5, "reward/success_rate": 0.25, "perf/tokens_per_second": 80.0}
VALIDATION = {"val/reward_score": 0.4, "val/avg@1": 0.375, "perf/seconds_validation": 1.0}


def text_of(html):
    return re.sub(r"<[^>]*>", "", html)


@pytest.fixture
def drawn(monkeypatch):
    """The panels of each drawn chart."""
    charts = []
    monkeypatch.setattr(notebook, "make_chart", lambda title, panels: charts.append(panels))
    monkeypatch.setattr(notebook, "to_html", lambda figure, alt: "<img>")
    return charts


def points(panels):
    return {(panel.title, line.name): list(line.points) for panel in panels for line in panel.lines}


def test_one_output_shows_numbers_and_curves():
    shown = []
    progress = NotebookProgress("colours <1>", 2, 2, shown.append)
    assert "starting" in shown[-1] and "<img" not in shown[-1], "there is nothing to draw yet"
    progress.validation(0, VALIDATION, {}, [])
    progress.metrics(1, STEP)
    progress.metrics(2, STEP)
    progress.validation(2, VALIDATION | {"val/avg@1": 0.5}, {}, [])
    progress.close()
    assert "finished at step 2/2  reward 0.500  accuracy 0.25  tok/s 80" in text_of(shown[-1])
    assert "val/avg@1: 0.375 at step 0, 0.500 at step 2; best 0.500 at step 2" in text_of(shown[-1])
    (picture,) = re.findall(r'src="data:image/png;base64,([^"]+)"', shown[-1])
    assert len(picture) < 100_000


def test_drawing_takes_a_small_share_of_the_time(drawn):
    """Steps of no time at all: only the first and the last are drawn."""
    progress = NotebookProgress("fast", 200, -1, lambda html: None)
    progress._cost = 1e6
    for step in range(1, 201):
        progress.metrics(step, STEP)
        progress._cost = 1e6
    assert len(drawn) == 1 and len(points(drawn[-1])["reward", "training"]) == 200


def test_a_resumed_run_continues_its_curves(drawn):
    earlier = [
        {"step": 0, "attempt": 1, **VALIDATION},
        *({"step": step, "attempt": 1, **STEP} for step in (1, 2, 3)),
        {"step": 3, "attempt": 1, **VALIDATION, "val/avg@1": 0.9},
    ]
    shown = []
    progress = NotebookProgress("run", 4, 2, shown.append, earlier)
    progress.metrics(3, STEP | {"reward/overall": 0.75})  # saved after step 2: step 3 is done again
    progress.validation(3, VALIDATION, {}, [])
    curve = points(drawn[-1])
    assert curve["reward", "training"] == [(1, 0.5), (2, 0.5), (3, 0.75)]
    assert curve["accuracy", "validation"] == [(0, 0.375), (3, 0.375)]
    assert "best 0.375" in shown[-1], "the undone validation does not count"
    progress.close()
    assert "stopped at step 3/4" in text_of(shown[-1])


def test_a_picture_never_ends_a_run(caplog):
    def fail(html):
        raise ValueError("no room")

    progress = NotebookProgress("run", 2, -1, fail)
    progress.metrics(1, STEP)
    progress.close()
    assert caplog.text.count("cannot be shown in this cell (ValueError: no room)") == 1


@pytest.mark.parametrize(
    ("shell", "expected"), [(None, False), (SimpleNamespace(), False), (SimpleNamespace(kernel=1), True)]
)
def test_only_the_kernel_of_a_notebook_shows_it(monkeypatch, shell, expected):
    module = ModuleType("IPython")
    module.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", module)
    assert (find_shell() is not None) is expected


def test_without_ipython_there_is_no_notebook(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert find_shell() is None and "IPython" not in sys.modules, "asking imports nothing"
