"""An engine holds device memory only inside `with engine.resident()`."""

import pytest

from mtrl.rollout.lifecycle import EngineLifecycle


class Engine(EngineLifecycle):
    def __init__(self):
        self.calls = []

    def wake(self):
        assert not self.is_resident
        self.calls.append("wake")

    def sleep(self):
        assert not self.is_resident
        self.calls.append("sleep")


def test_each_block_wakes_once_and_sleeps_once():
    engine = Engine()
    assert not engine.is_resident
    for _ in range(2):
        with engine.resident():
            assert engine.is_resident
    assert engine.calls == ["wake", "sleep"] * 2


def test_only_the_outermost_block_counts():
    engine = Engine()
    with engine.resident():
        for _ in range(2):
            with engine.resident(), engine.resident():
                assert engine.calls == ["wake"]
            assert engine.is_resident and engine.calls == ["wake"]
    assert engine.calls == ["wake", "sleep"]


def test_it_sleeps_after_an_exception_inside():
    engine = Engine()
    with pytest.raises(KeyError), engine.resident():
        with pytest.raises(KeyError), engine.resident():
            raise KeyError
        assert engine.is_resident, "the outer block continues"
        raise KeyError
    assert engine.calls == ["wake", "sleep"] and not engine.is_resident


def test_an_engine_that_fails_to_wake_is_not_awake():
    engine = Engine()
    engine.wake = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError), engine.resident():
        raise AssertionError("never here")
    assert not engine.is_resident and engine.calls == []


def test_two_engines_are_independent():
    one, other = Engine(), Engine()
    with one.resident():
        assert not other.is_resident
