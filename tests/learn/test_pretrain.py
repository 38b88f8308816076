"""The cold start: its lessons are what the shipped model learned, and the command makes a checkpoint that loads."""

import json
from dataclasses import replace

import pytest
import torch

from mtrl.embedded.embedded_rows import MODEL_DIRECTORY
from mtrl.models.backbone import Backbone
from mtrl.models.families import load_encoder
from mtrl.models.load_model import load_model
from pretraining import pretrain


def test_the_shipped_model_knows_its_lessons():
    encoder = load_encoder(MODEL_DIRECTORY)
    course = pretrain.COURSES["zoo"]
    made = [pretrain.make_lesson(i, encoder, course) for i in range(40)]
    lessons = pretrain.pad_lessons(made, torch.device("cpu"), course)
    torch.testing.assert_close(lessons.probabilities.sum(1), torch.ones(40))
    backbone = Backbone(load_model(MODEL_DIRECTORY))
    looking = torch.ones(40, dtype=torch.long)  # the second way of the teacher: it looks and names what it sees
    with torch.no_grad():
        known = float(pretrain.teacher_loss(backbone, lessons, torch.arange(40), looking))
        unseen = lessons._replace(pixels=lessons.pixels.roll(1, 0))  # each question with its neighbour's picture
        blind = float(pretrain.teacher_loss(backbone, unseen, torch.arange(40), looking))
    assert known < 0.2 < blind


def made(folder, *words):
    """What the command writes of itself."""
    threads = torch.get_num_threads()
    pretrain.main([*words, "--out", str(folder), "--device", "cpu"])
    torch.set_num_threads(threads)
    return json.loads((folder / "made_by.json").read_text())


def test_the_command_makes_a_checkpoint(tmp_path):
    made_by = made(tmp_path, "--steps", "6", "--batch", "8", "--lessons", "40", "--questions", "5")
    assert made_by["steps"] == 6 and made_by["loss"] < 6.2, "log(512) = 6.24 is what a model that knows nothing pays"
    assert set(made_by["greedy"]) == {"avg", "best", "form", "by_kind"}
    assert load_model(tmp_path, dtype="bf16").dtype == torch.bfloat16
    assert load_encoder(tmp_path).fingerprint() == load_encoder(MODEL_DIRECTORY).fingerprint()


@pytest.mark.slow
def test_the_other_task_has_the_same_command(tmp_path, monkeypatch):
    """A course much shorter than the real one: the words are learnt first."""
    monkeypatch.setitem(pretrain.COURSES, "scenes", replace(pretrain.COURSES["scenes"], longest=16))
    made_by = made(tmp_path, "scenes", "--steps", "12", "--batch", "4", "--lessons", "40", "--questions", "2")
    assert made_by["steps"] == 12 and made_by["loss"] < 6.2, "log(700) = 6.6 is what a model that knows nothing pays"
    assert set(made_by["blank"]["by_kind"]) == {"colour", "shape"}, "of the first two questions"
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 15e6, "small enough to be shipped"
    model, encoder = load_model(tmp_path), load_encoder(tmp_path)
    assert model.get_input_embeddings().num_embeddings == len(encoder.tokenizer)
