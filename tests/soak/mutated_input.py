"""Ten thousand damaged configurations, rows and images, in portions: a soak continues after the last portion."""

from __future__ import annotations

import tempfile
from pathlib import Path

from soak import config_fuzz, data_fuzz
from soak.ledger import Ledger

PORTION = 500  # configurations between two entries of the ledger


def configurations(ledger: Ledger, cases: int) -> None:
    for first in range(ledger.get("cases"), cases, PORTION):
        counts, failures, slowest = config_fuzz.fuzz(range(first, min(first + PORTION, cases)), seed=0)
        assert not failures, "\n\n".join(failures)
        add(ledger, counts)
        ledger.record(cases=min(first + PORTION, cases), slowest_s=round(max(slowest, ledger.get("slowest_s")), 3))
        print(f"configs: {ledger.get('cases')} of {cases}", flush=True)
    ledger.record(passed=True)


def rows(ledger: Ledger, cases: int) -> None:
    data_fuzz.quiet()
    size = data_fuzz.ROWS_OF_A_FILE
    with tempfile.TemporaryDirectory() as scratch:
        real = data_fuzz.tiny_encoder(Path(scratch))
        for first in range(ledger.get("cases"), cases, size):
            count = min(size, cases - first)
            add(ledger, data_fuzz.batch(first // size, count, seed=0, real=real))
            ledger.record(cases=first + count)
            print(f"rows: {first + count} of {cases}", flush=True)
    ledger.record(passed=True)


def add(ledger: Ledger, counts: dict[str, int]) -> None:
    ledger.record(**{name: ledger.get(name) + count for name, count in counts.items()})
