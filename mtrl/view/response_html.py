"""Recorded responses as static HTML for a notebook: each token coloured by one of its numbers, without scripts."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from mtrl.report.conversation import list_facts
from mtrl.tracking.blocks import RECORD_DIR
from mtrl.tracking.streams import EXTRA
from mtrl.utils.terminal import sanitize
from mtrl.view.query import rows_with_signal
from mtrl.view.rollout_store import IMAGE_LISTS, Json, RecordedRollouts, image_keys
from mtrl.view.signal_names import STREAMS, SignalName, name_signal

AMOUNT, ABOVE, BELOW = "236, 112, 20", "20, 130, 190", "221, 92, 34"  # red, green, blue, as in view.css
MESSAGE = "margin: 4px 0; padding: 4px 8px; border-left: 3px solid #9fb4c4; background: rgba(159, 180, 196, 0.15)"
STRONGEST = 0.82  # opacity: the text must show through
NO_RECORD = "no responses are recorded in {}; train first, with record_rollouts_per_step above 0"
TIPS = ("dependency", "entropy", "advantage", "weight", "old", "mask", "trained")  # in the tooltip of a token


COLOURINGS = {
    "dependency": SignalName(
        "dependency", "visual dependency S: how much its probability changes if the image is perturbed"
    ),
    "entropy": SignalName("entropy", "entropy of the policy at the token, in nats"),
    "advantage": SignalName("advantage", "advantage times weight, which it is trained with", 0.0),
    "weight": SignalName("weight", "factor of its advantage", 1.0),
    "mask": SignalName("mask", "whether the filters keep it"),
    "old": SignalName("old", "log-probability before the update"),
    "vision_all": SignalName("vision_all", "share of its attention on the image"),
}


@dataclass(frozen=True)
class ResponsesView:
    """The responses to one prompt. A notebook shows it as HTML; as text it is the responses with their rewards."""

    responses: Sequence[Json]  # as `RolloutStore.response` returns them
    images: Mapping[str, bytes]
    signal: str

    def __repr__(self) -> str:
        first = self.responses[0]
        lines = [f"step {first['step']}, {first['prompt']['text']} (answer {first['prompt']['answer']})"]
        lines += [f"row {one['row']}, reward {one['reward']:.3f}: {one['text']}" for one in self.responses]
        return sanitize("\n".join(lines))

    @property
    def colouring(self) -> SignalName:
        return COLOURINGS.get(self.signal) or name_signal(self.signal)

    def _repr_html_(self) -> str:
        first, scale = self.responses[0], self._scale()
        prompt = first["prompt"]
        colour = f"colour: {self.colouring.label}, {self.colouring.meaning}; up to {scale:.3g}"
        keys = [key for name in IMAGE_LISTS for key in prompt[name] or []]
        pictures = "".join(self._picture(key, "image of the prompt") for key in dict.fromkeys(keys))
        asked = f"<pre>{clean(prompt['text'] or '')}\nanswer: {clean(str(prompt['answer']))}</pre>"
        rows = "".join(self._response(one, scale) for one in self.responses)
        head = f"<b>step {first['step']}</b> · {clean(colour)} · underlined: trained on"
        return f'<div>{head}<div style="display: flex; gap: 1em">{pictures}{asked}</div>{rows}</div>'

    def _scale(self) -> float:
        """The largest distance from the centre, over all responses, so that their colours compare."""
        distances = [abs(x) for one in self.responses for x in self._distances(one) if x is not None]
        return max(distances, default=0.0) or 1.0

    def _distances(self, one: Json) -> list[float | None]:
        """Of each token's number from the centre."""
        values, centre = one["streams"].get(self.signal, [None] * len(one["pieces"])), self.colouring.centre or 0.0
        return [None if value is None else value - centre for value in values]

    def _picture(self, key: str, what: str) -> str:
        data, kind = self.images[key], "png" if self.images[key].startswith(b"\x89PNG") else "jpeg"
        source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
        return f'<img alt="{what}" src="{source}" style="height: 112px; image-rendering: pixelated">'

    def _response(self, one: Json, scale: float) -> str:
        tokens = []
        for place, (piece, distance) in enumerate(zip(one["pieces"], self._distances(one), strict=True)):
            numbers = {name: one["streams"][name][place] for name in (self.signal, *TIPS) if name in one["streams"]}
            tip = "\n".join(f"{name} {value}" for name, value in numbers.items())
            share = 0.0 if distance is None else min(1.0, abs(distance) / scale) ** 0.5
            colour = AMOUNT if self.colouring.centre is None else ABOVE if (distance or 0.0) > 0 else BELOW
            line = "2px solid" if numbers.get("trained") else "2px solid transparent"
            look = f"background: rgba({colour}, {STRONGEST * share:.2f}); border-bottom: {line}; white-space: pre-wrap"
            tokens.append(f'<span style="{look}" title="{escape(tip)}">{clean(piece)}</span>')
        for message in reversed(one["messages"]):
            tokens.insert(message["after"], self._message(message))
        return f'<div style="line-height: 1.9; margin: 1em 0"><b>reward {one["reward"]:.2f}</b> {"".join(tokens)}</div>'

    def _message(self, message: Json) -> str:
        """What an environment said in the middle of the response."""
        pictures = "".join(self._picture(key, "image of the message") for key in message["images"])
        text = f'<pre style="margin: 0; white-space: pre-wrap">{clean(message["content"])}</pre>'
        return f'<div style="{MESSAGE}"><small>{clean(list_facts(message))}</small>{text}{pictures}</div>'


def clean(text: str) -> str:
    return escape(sanitize(text))


def view_responses(
    run: Path, step: int | None = None, row: int | None = None, signal: str | None = None, most: int = 4
) -> ResponsesView:
    """The best and the worst responses to one prompt of a recorded step, `most` in all: by default of the last step, to
    the first prompt whose responses have different rewards. `row` is any response to the prompt. Raises a ValueError
    that says what there is."""
    store = RecordedRollouts(run / RECORD_DIR)
    store.refresh()
    steps = store.steps()
    if not steps:
        raise ValueError(NO_RECORD.format(run))
    step = max(steps) if step is None else step
    if step not in steps:
        raise ValueError(f"step {step} is not recorded; there are {min(steps)} to {max(steps)}")
    if row is None:
        row = min(rows_with_signal(store, step), default=0)
    if not 0 <= row < steps[step]:
        raise ValueError(f"row {row}: step {step} has the rows 0 to {steps[step] - 1}")
    group = [store.response(step, member) for member in store.response(step, row)["members"]]
    best_first = sorted(group, key=lambda one: -one["reward"])
    count = min(max(most, 1), len(group))
    responses = best_first[: count - count // 2] + best_first[len(group) - count // 2 :]
    keys = dict.fromkeys(key for one in responses for key in image_keys(one))
    return ResponsesView(responses, {key: store.image(step, key) for key in keys}, choose_signal(responses, signal))


def choose_signal(responses: Sequence[Json], signal: str | None) -> str:
    """The stream of this signal, or the first that was measured; those of single rules have a prefix in the record."""
    known = responses[0]["streams"]
    if signal is None:
        return next((name for name in COLOURINGS if name in known), "advantage")
    for name in (STREAMS.get(signal, signal), EXTRA + signal):
        if name in known:
            return name
    names = ", ".join(name.removeprefix(EXTRA) for name in known)
    raise ValueError(f"signal {signal!r} is not recorded; there are {names}")
