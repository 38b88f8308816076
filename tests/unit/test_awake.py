"""An engine holds device memory inside `with engine.awake()`, and at no other time."""

import pytest

from mtrl.rollout.lifecycle import Awake


class Engine(Awake):
    def __init__(self):
        self.calls = []

    def wake(self):
        assert not self.is_awake
        self.calls.append("wake")

    def sleep(self):
        assert not self.is_awake
        self.calls.append("sleep")


def test_each_block_wakes_once_and_sleeps_once():
    engine = Engine()
    assert not engine.is_awake
    for _ in range(2):
        with engine.awake():
            assert engine.is_awake
    assert engine.calls == ["wake", "sleep"] * 2


def test_only_the_outermost_block_counts():
    engine = Engine()
    with engine.awake():
        for _ in range(2):
            with engine.awake(), engine.awake():
                assert engine.calls == ["wake"]
            assert engine.is_awake and engine.calls == ["wake"]
    assert engine.calls == ["wake", "sleep"]


def test_it_sleeps_after_an_exception_inside():
    engine = Engine()
    with pytest.raises(KeyError), engine.awake():
        with pytest.raises(KeyError), engine.awake():
            raise KeyError
        assert engine.is_awake, "the outer block goes on"
        raise KeyError
    assert engine.calls == ["wake", "sleep"] and not engine.is_awake


def test_one_that_cannot_wake_is_not_awake():
    engine = Engine()
    engine.wake = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError), engine.awake():
        raise AssertionError("never here")
    assert not engine.is_awake and engine.calls == []


def test_two_engines_know_nothing_of_each_other():
    one, other = Engine(), Engine()
    with one.awake():
        assert not other.is_awake
