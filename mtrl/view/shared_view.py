"""Contents of an HTML report: the metrics of all runs, and responses of some steps from the first to the last."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence

from mtrl.tracking.blocks import DamagedRecord
from mtrl.view.rollout_store import SORTED_BY, Json, RolloutStore, image_keys
from mtrl.view.run_index import RunFolder

STEPS = 8  # steps with responses, including the first and the last
MAPS_BYTES = 4 * 2**20  # limit of the attention maps; later responses come without


def collect_report(runs: Sequence[RunFolder], rollouts: int) -> Json:
    """All data that the page would request from a server, by the name of the request."""
    images: dict[str, str] = {}
    responses = [collect_responses(run.store, rollouts // len(runs), images) for run in runs]
    summaries = []
    for run, collected in zip(runs, responses, strict=True):
        counts = Counter(one["step"] for one in collected)
        listed = {"steps": sorted(counts), "counts": [counts[step] for step in sorted(counts)]}
        summaries.append(run.summary() | listed | {"live": False, "path": run.name})
    return {
        "about": {"steps": max(each["last_step"] for each in summaries)},
        "runs": {"runs": summaries, "sorted_by": SORTED_BY},
        "series": [run.history.series(sorted(run.history.metrics)) for run in runs],
        "glossary": {name: line for run in runs for name, line in run.glossary().items()},
        "rollouts": responses,
        "images": images,
        "maps": collect_maps(runs, responses),
        "config": [run.config() or "" for run in runs],
    }


def collect_responses(store: RolloutStore, count: int, images: dict[str, str]) -> list[Json]:
    """The first responses of steps spread over the run; their images are added once each."""
    steps = list(store.steps())
    last = len(steps) - 1
    indices = sorted({round(last * k / (STEPS - 1)) for k in range(STEPS)}) if steps else []
    responses: list[Json] = []
    for number, index in enumerate(indices):
        step_count = (count - len(responses)) // (len(indices) - number)
        try:
            responses += collect_step(store, steps[index], step_count, images)
        except (DamagedRecord, KeyError, OSError):
            continue  # the run reports the damage
    return responses


def collect_maps(runs: Sequence[RunFolder], responses: Sequence[Sequence[Json]]) -> dict[str, Json]:
    """The attention maps by "run step row": of the first response of each group, then of the second, and so on, up to
    MAPS_BYTES."""
    recorded = [(number, one) for number, some in enumerate(responses) for one in some if "grids" in one]
    collected: dict[str, Json] = {}
    bytes_left = MAPS_BYTES
    for number, one in sorted(recorded, key=lambda each: each[1]["members"].index(each[1]["row"])):
        maps = runs[number].store.maps(one["step"], one["row"])
        bytes_left -= len(maps["levels"]) + 8 * len(maps["scale"])
        if bytes_left < 0:
            break
        collected[f"{number} {one['step']} {one['row']}"] = maps
    return collected


def collect_step(store: RolloutStore, step: int, count: int, images: dict[str, str]) -> list[Json]:
    """The first `count` responses of a step, with only these as members of their groups."""
    rows = range(min(count, store.steps()[step]))
    responses = [store.response(step, row) for row in rows]
    for one in responses:
        for key in image_keys(one):
            if key not in images:
                data = store.image(step, key)
                kind = "png" if data.startswith(b"\x89PNG") else "jpeg"
                images[key] = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return [one | {"members": [member for member in one["members"] if member in rows]} for one in responses]
