"""What a report holds: all numbers of the runs, and some of their responses, from the first step to the last."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from mtrl.tracking.blocks import DamagedRecord
from mtrl.view.rollout_store import SORTED_BY, Json, RolloutStore
from mtrl.view.run_index import RunFolder

STEPS_SHOWN = 8  # steps that the responses come from, the first and the last among them
MAPS_BYTES = 4 * 2**20  # of attention maps; responses after that come without
POINTS = 1000  # of a curve: a longer one is thinned out


def shared(runs: Sequence[RunFolder], rollouts: int) -> Json:
    """All that the page asks a server for, by the names of its questions."""
    images: dict[str, str] = {}
    responses = [some_responses(run.book, rollouts // len(runs), images) for run in runs]
    maps = shared_maps(runs, responses)
    about = []
    for run, shown in zip(runs, responses, strict=True):
        steps = sorted({each["step"] for each in shown})
        counts = [sum(each["step"] == step for each in shown) for step in steps]
        about.append(run.about() | {"steps": steps, "counts": counts, "live": False, "path": run.name})
    return {
        "about": {"steps": max(each["last_step"] for each in about)},
        "runs": {"runs": about, "sorted_by": SORTED_BY},
        "series": [{name: thinned(*points) for name, points in metric_series(run).items()} for run in runs],
        "rollouts": responses,
        "images": images,
        "maps": maps,
        "config": [run.config() or "" for run in runs],
    }


def metric_series(run: RunFolder) -> dict[str, list[Sequence[float]]]:
    return run.history.series(sorted(run.history.metrics))


def thinned(steps: Sequence[float], values: Sequence[float]) -> list[list[float]]:
    every = -(-len(steps) // POINTS) or 1
    return [list(steps[::-1][::every][::-1]), list(values[::-1][::every][::-1])]  # the newest stays


def some_responses(book: RolloutStore, count: int, images: dict[str, str]) -> list[Json]:
    """Whole groups of steps spread over the run, and their images once each."""
    steps = list(book.steps())
    last = len(steps) - 1
    chosen = sorted({round(last * k / (STEPS_SHOWN - 1)) for k in range(STEPS_SHOWN)}) if steps else []
    found: list[Json] = []
    for number, place in enumerate(chosen):
        wanted = (count - len(found)) // (len(chosen) - number)
        try:
            found += whole_groups(book, steps[place], wanted, images)
        except (DamagedRecord, KeyError, OSError):
            continue  # the run says what is damaged
    return found


def shared_maps(runs: Sequence[RunFolder], responses: Sequence[Sequence[Json]]) -> dict[str, Json]:
    """Where the tokens look, by "run step row", of the first response of each group, then of the second, and so on, as
    long as there is room."""
    there = [(one["members"].index(one["row"]), number, one) for number, shown in enumerate(responses) for one in shown
             if "grids" in one]  # fmt: skip
    found: dict[str, Json] = {}
    room = MAPS_BYTES
    for _, number, one in sorted(there, key=lambda each: each[0]):
        maps = runs[number].book.maps(one["step"], one["row"])
        room -= len(maps["levels"]) + 8 * len(maps["scale"])
        if room < 0:
            break
        found[f"{number} {one['step']} {one['row']}"] = maps
    return found


def whole_groups(book: RolloutStore, step: int, wanted: int, images: dict[str, str]) -> list[Json]:
    found: list[Json] = []
    for place in range(min(wanted, book.steps()[step])):
        one = book.response(step, place)
        for key in [*(one["prompt"]["images"] or []), *(one["prompt"]["perturbed"] or [])]:
            if key not in images:
                data = book.image(step, key)
                kind = "png" if data.startswith(b"\x89PNG") else "jpeg"
                images[key] = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
        found.append(one)
    shown = {one["row"] for one in found}
    return [one | {"members": [member for member in one["members"] if member in shown]} for one in found]
