"""Every signal that a rule or a loss term declares is recorded, and a colour of the viewer with a name to read."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from view_helpers import make_step, recorded

import mtrl.view
from mtrl import types
from mtrl.algorithms.credit.registry import RULES, make_rule
from mtrl.algorithms.loss_terms.papo import Papo
from mtrl.tracking.blocks import RECORD_DIR
from mtrl.tracking.record import OF_SIGNALS
from mtrl.tracking.streams import EXTRA
from mtrl.types import VIEWS, Signals
from mtrl.view.response_html import view_responses
from mtrl.view.signal_names import NAMES, OF_A_VIEW, STREAMS, name_signal

HEATS = set(re.findall(r'key: "(\w+)"', (Path(mtrl.view.__file__).parent / "static/heat.js").read_text()))
SPECS = [{"name": name, "rule": "pgpo"} if name == "shuffled" else name for name in RULES]
NEEDS = {signal for each in [Papo(), *map(make_rule, SPECS)] for signal in each.needs.names}
OF_TOKENS = {name for name in VIEWS if "attention" not in name}


@pytest.fixture
def run(tmp_path):
    """A record of three responses with everything that any rule reads, all of it 0.5."""
    step = make_step()
    values = torch.full(step.rollouts.mask.shape, 0.5)
    fields = dict.fromkeys(NEEDS & OF_TOKENS, values)
    extra = dict.fromkeys(NEEDS - VIEWS.keys(), values)
    signals = Signals(**fields, extra=extra, attention_mass=step.signals.attention_mass)
    recorded(tmp_path / RECORD_DIR, replace(step, signals=signals))
    return tmp_path


def test_what_a_rule_reads_is_a_colour(run):
    assert {"logprobs@none", "jsd@noised(2)", "token_similarity", "image_shift", "perturbed_logprobs"} < NEEDS
    one = view_responses(run).responses[0]
    for signal in NEEDS:
        chosen = view_responses(run, signal=signal)
        own_heat = chosen.signal.replace("vision_all", "vision") in HEATS
        assert one["streams"][chosen.signal] == ([0.0] if signal == "attention_mass" else [0.5]) * 2
        assert own_heat != (chosen.signal in one["signals"]), f"{signal}: one button for it"
    labels = [each["label"] for each in one["signals"].values()]
    assert len(set(labels)) == len(labels) and not re.search(r"[_@]", "".join(labels))


def test_every_signal_has_a_name():
    streams = {name: stream for stream, name in OF_SIGNALS.items()}
    assert {streams.get(name, name) for name in OF_TOKENS} == NAMES.keys() | (HEATS & OF_SIGNALS.keys())
    assert OF_A_VIEW.keys() == set(types.OF_A_VIEW)
    renamed = {name: stream for name, stream in streams.items() if name != stream}
    assert {**renamed, "attention_mass": "vision_all"} == STREAMS


def test_names_of_views_and_of_users(run):
    named = name_signal(f"{EXTRA}jsd@crop(0.5)")
    assert named.label == "JSD, view crop(0.5)" and "view `crop(0.5)`" in named.meaning and named.centre is None
    margin, unknown = name_signal(f"{EXTRA}margin@home"), name_signal("behaviour")
    assert (
        margin.label == "margin@home" and "optimization.signals" in margin.meaning and unknown.meaning == "as recorded"
    )
    html = view_responses(run, signal="logprobs@none")._repr_html_()
    assert "colour: log-prob, view none, log-probability of the token; view `none` of the image; up to 0.5" in html
