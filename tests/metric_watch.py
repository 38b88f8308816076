"""Every run of the tests is watched: it may only write metrics that the glossary explains."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType

from mtrl.protocols import Tracker
from mtrl.tracking.table import flatten_rates
from mtrl.utils.metric_glossary import find_metric

OF_EXAMPLES = {"actor/my_mean_weight", "actor/brevity_bonus"}  # returned by the credit rules in examples/


class MetricWatch(Tracker):
    def metrics(self, step, values):
        check_explained(values)

    def validation(self, step, values, by, samples):
        check_explained({**values, **flatten_rates(by)})


def check_explained(names: Iterable[str]) -> None:
    missing = [name for name in names if name not in OF_EXAMPLES and find_metric(name) is None]
    assert not missing, f"mtrl/utils/metrics.yaml has no entry for {', '.join(missing)}"


def watch_runs(composition: ModuleType) -> None:
    """Give every run that `mtrl.compose.run` builds from now on a watch among its trackers."""
    build = composition.build_trackers
    composition.build_trackers = lambda *arguments: [*build(*arguments), MetricWatch()]
