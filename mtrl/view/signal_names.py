"""Names and meanings of the recorded signals that have no heat map of their own in static/heat.js. Single rules, loss
terms, the reference, the critic and users' classes have them measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from mtrl.tracking.streams import EXTRA


class SignalName(NamedTuple):
    label: str
    meaning: str
    centre: float | None = None  # that its values lie around; None: amounts from 0
    sign: int = 1  # of amounts


NAMES = {  # by stream, without the prefix
    "perturbed": SignalName("log-prob, perturbed", "log-probability of the token under the perturbed image", sign=-1),
    "reference": SignalName("log-prob, reference", "log-probability of the token under the reference model", sign=-1),
    "values": SignalName("value", "value of the critic before the token", 0.0),
    "support": SignalName("support", "log-probability of the tokens that top-p and top-k leave", sign=-1),
    "routing_mismatch": SignalName("routing mismatch", "share of the sampler's experts that the policy did not choose"),
    "entropy_change": SignalName("entropy change", "entropy under the perturbed image minus entropy, in nats", 0.0),
    "similarity": SignalName("similarity before", "cosine of the last state before the token to the image", 0.0),
    "token_similarity": SignalName("similarity", "cosine of the last state at the token to the image", 0.0),
    "layer_similarity": SignalName("similarity, layers", "mean cosine to image tokens over all layers", 0.0),
    "image_share": SignalName("image share", "share of the last layer's attention on the image"),
    "text_share": SignalName("text share", "share of the last layer's attention on the text after the image"),
    "image_shift": SignalName("image shift", "how far the last layer's attention moved within the image"),
    "text_shift": SignalName("text shift", "how far the last layer's attention moved within the text after the image"),
    "divergence": SignalName("divergence", "KL to the reference over the whole vocabulary, in nats"),
}
STREAMS = {  # of the signals that are recorded under other names
    "old_logprobs": "old", "perturbed_logprobs": "perturbed", "ref_logprobs": "reference",
    "attention_mass": "vision_all",
}  # fmt: skip
OF_A_VIEW = {  # signals of another view of the image, such as kl@none
    "logprobs": SignalName("log-prob", "log-probability of the token", sign=-1),
    "entropy": SignalName("entropy", "entropy of the policy, in nats"),
    "kl": SignalName("KL", "KL(original, view) over the whole vocabulary, in nats"),
    "reverse_kl": SignalName("reverse KL", "KL(view, original) over the whole vocabulary, in nats"),
    "jsd": SignalName("JSD", "Jensen-Shannon divergence of original and view, in nats"),
    "jsd_top100": SignalName("JSD of 100", "the same of the 100 most likely tokens and all others as one, in nats"),
}


def name_signal(stream: str) -> SignalName:
    """The name of a signal by that of its stream; a user's signal has its own.

    >>> name_signal("extra_jsd@noised(2)").label, name_signal("extra_margin").label
    ('JSD, view noised(2)', 'margin')
    """
    name = stream.removeprefix(EXTRA)
    kind, _, view = name.partition("@")
    if view and (of_view := OF_A_VIEW.get(kind)):
        label, meaning = f"{of_view.label}, view {view}", f"{of_view.meaning}; view `{view}` of the image"
        return of_view._replace(label=label, meaning=meaning)
    own = "a signal of optimization.signals" if stream.startswith(EXTRA) else "as recorded"
    return NAMES.get(name) or SignalName(name, own, 0.0)


def name_signals(streams: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The names of those streams that are such signals."""
    return {name: name_signal(name)._asdict() for name in streams if name.startswith(EXTRA) or name in NAMES}
