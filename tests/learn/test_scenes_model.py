"""The pretrained model of `scenes`: it has the skill, makes the wrong choices, and uses the image."""

import json

import numpy as np
import pytest

from mtrl.embedded.scenes import causal_spans, make_question
from mtrl.models.backbone import Backbone
from mtrl.models.families import load_encoder
from mtrl.models.load_model import load_model
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Sampling
from mtrl.utils.embedded_models import MODELS
from pretraining.evaluation import CHANCE, grade, make_prompts
from pretraining.pretrain import CURRICULA

MODEL = MODELS["scenes"]


def test_the_numbers_in_its_card():
    """It has skill in every kind of question and room to improve, samples are about as good as greedy answers, and with
    blank images it is not better than chance (it is worse: an unknown image breaks its answer format)."""
    written = json.loads((MODEL / "made_by.json").read_text())
    greedy, sampled, blank = (written[name] for name in ("greedy", "sampled at temperature 1, 8 times", "blank"))
    assert 0.45 <= greedy["avg"] <= 0.65 and greedy["form"] > 0.97 and sampled["form"] > 0.97
    assert min(greedy["by_kind"].values()) > 2 * CHANCE < min(sampled["by_kind"].values())
    assert 0.45 <= sampled["avg"] <= 0.6 < 0.85 < sampled["best"], "correct answers can be sampled"
    assert blank["avg"] < CHANCE + 0.02 and max(blank["by_kind"].values()) < CHANCE + 0.02
    curriculum = CURRICULA["scenes"]
    sizes = (curriculum.steps, curriculum.batch_size)
    assert (written["steps"], written["batch"]) == sizes, "the command makes this model again"
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 15e6


@pytest.mark.slow
def test_it_answers_as_its_card_states():
    """On the first 80 questions, within three standard errors; and most of an answer is noise."""
    encoder, questions = load_encoder(MODEL), [make_question("test", index) for index in range(80)]
    engine = LocalGenerator(Backbone(load_model(MODEL)), encoder)
    rollouts = engine.generate(make_prompts(questions, encoder), Sampling(temperature=0, max_new_tokens=208))
    written = json.loads((MODEL / "made_by.json").read_text())["greedy"]["avg"]
    assert abs(grade(questions, rollouts).avg - written) < 3 * (0.25 / 80) ** 0.5
    spans = [causal_spans(question.columns, text) for question, text in zip(questions, rollouts.text, strict=True)]
    assert np.mean([found is not None for found in spans]) > 0.97
    assert 80 <= rollouts.mask.sum(1).float().mean() <= 200
