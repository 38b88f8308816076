"""Starting Ray: it is retried on a busy machine, and SIGTERM keeps its handler."""

import signal

import pytest

ray = pytest.importorskip("ray")

from mtrl.distributed import ray_group as worker_group  # noqa: E402
from mtrl.utils.errors import StartError  # noqa: E402


@pytest.fixture
def starts(monkeypatch):
    """What happens at each attempt: an error, or None. SIGTERM is Ray's afterwards, as it would be."""
    planned, handler = [], signal.getsignal(signal.SIGTERM)

    def init(**options):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if (error := planned.pop(0)) is not None:
            raise error

    monkeypatch.setattr(worker_group.ray, "init", init)
    monkeypatch.setattr(worker_group.ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield planned
    signal.signal(signal.SIGTERM, handler)


SLOW = Exception("The current node timed out during startup.")


def test_a_start_that_took_too_long_is_tried_again(starts):
    starts += [SLOW, SLOW, None, SLOW]
    assert worker_group.open_ray(2) is True
    assert starts == [SLOW]


def test_a_failed_start_of_ray_is_reported_in_one_line(starts):
    starts += [SLOW, SLOW, SLOW]
    with pytest.raises(StartError, match=r"Ray does not start on this machine in 3 attempts: The current node"):
        worker_group.open_ray(2)


def test_sigterm_ends_with_the_status_of_a_signal(starts):
    starts += [None]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    worker_group.open_ray(2)
    with pytest.raises(SystemExit) as left:
        signal.raise_signal(signal.SIGTERM)
    assert left.value.code == 143


def test_a_handler_that_was_there_stays(starts):
    starts += [None]
    seen = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    worker_group.open_ray(2)
    signal.raise_signal(signal.SIGTERM)
    assert seen == [signal.SIGTERM]
