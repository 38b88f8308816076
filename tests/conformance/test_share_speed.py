"""Speed of sharing the prompt within its group, on the embedded model, with and without sharing in one run."""

from statistics import median

import pytest

from mtrl.compose.run import build, configure

STEPS = 6


def make_run(directory, share_prefix):
    overrides = {
        "training.output_dir": str(directory),
        "training.experiment_name": f"share-{share_prefix}",
        "training.logger": (),
        "training.val_before_train": False,
        "worker.actor.share_prefix": share_prefix,
    }
    return build(configure(None, overrides)[0])


@pytest.mark.slow
def test_probe_and_update_are_faster_with_sharing(tmp_path):
    """The settings of `mtrl demo`; the two take turns, so that both see the same machine."""
    runs = {share: make_run(tmp_path, share) for share in (True, False)}
    ratios = []
    for step in range(STEPS):
        seconds = {}
        for share, run in runs.items():
            metrics = run.loop.step(step)
            seconds[share] = metrics["perf/seconds_probe"] + metrics["perf/seconds_update"]
        ratios.append(seconds[False] / seconds[True])
    for run in runs.values():
        run.closing.close()
    print(f"without sharing over with: {median(ratios[1:]):.2f}")
    assert median(ratios[1:]) >= 1.5, ratios
