"""The cold-started model of `scenes`, where it has been made: the skill is there, the choice is wrong, and it looks."""

import json

import numpy as np
import pytest

from mtrl.models.backbone import Backbone
from mtrl.models.families import load_encoder
from mtrl.models.load import load_model
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Sampling
from mtrl.zoo.exam import grade, prompts_of
from mtrl.zoo.rows import MODELS
from mtrl.zoo.scenes import CHANCE, causal_spans, make_question

MODEL = MODELS["scenes"]
pytestmark = pytest.mark.skipif(
    not (MODEL / "config.json").is_file(), reason="python -m mtrl.zoo.pretrain scenes makes it"
)


def test_what_is_written_beside_it():
    written = json.loads((MODEL / "made_by.json").read_text())
    assert 0.33 <= written["greedy"]["avg"] <= 0.55 and written["greedy"]["form"] > 0.97
    assert abs(written["blank"]["avg"] - CHANCE) < 0.04
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 15e6


@pytest.mark.slow
def test_it_answers_as_is_written():
    """On the first 80 questions, within three standard errors; and most of an answer is noise."""
    encoder, questions = load_encoder(MODEL), [make_question("test", index) for index in range(80)]
    engine = LocalGenerator(Backbone(load_model(MODEL)), encoder)
    rollouts = engine.generate(prompts_of(questions, encoder), Sampling(temperature=0, max_new_tokens=208))
    written = json.loads((MODEL / "made_by.json").read_text())["greedy"]["avg"]
    assert abs(grade(questions, rollouts).avg - written) < 3 * (0.25 / 80) ** 0.5
    spans = [causal_spans(question.columns, text) for question, text in zip(questions, rollouts.text, strict=True)]
    assert np.mean([found is not None for found in spans]) > 0.97
    assert 80 <= rollouts.mask.sum(1).float().mean() <= 200
