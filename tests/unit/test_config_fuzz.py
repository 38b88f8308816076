"""Two hundred mutated configurations; tests/soak/config_fuzz.py runs as many as there is time for."""

from soak.config_fuzz import fuzz, outcome

from mtrl.config import ConfigError


def test_mutated_configurations_load_or_are_errors():
    counts, failures, _ = fuzz(range(200), seed=1)
    assert not failures, "\n".join(failures)
    assert counts["refused"] >= 70 and counts["loaded"] >= 5 and counts["converted"] >= 1


def raise_(error):
    raise error


def test_the_fuzzer_can_fail():
    assert outcome(lambda: raise_(KeyError("x")))[0] == "failed"
    assert outcome(lambda: raise_(ConfigError(["two\nlines"])))[0] == "failed"
    assert outcome(lambda: raise_(ConfigError(["one line"])))[0] == "refused"
