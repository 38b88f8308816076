"""The cold start: its lessons are what the shipped model learned, and the command makes a checkpoint that loads."""

import json

import torch

from mtrl.models.backbone import Backbone
from mtrl.models.families import load_encoder
from mtrl.models.load import load_model
from mtrl.zoo import pretrain
from mtrl.zoo.rows import MODEL_DIRECTORY


def test_the_shipped_model_knows_its_lessons():
    encoder = load_encoder(MODEL_DIRECTORY)
    lessons = pretrain.pad_lessons([pretrain.make_lesson(i, encoder) for i in range(40)], torch.device("cpu"))
    torch.testing.assert_close(lessons.probabilities.sum(1), torch.ones(40))
    backbone = Backbone(load_model(MODEL_DIRECTORY))
    looking = torch.ones(40, dtype=torch.long)  # the second way of the teacher: it looks and names what it sees
    with torch.no_grad():
        known = float(pretrain.loss_of(backbone, lessons, torch.arange(40), looking))
        unseen = lessons._replace(pixels=lessons.pixels.roll(1, 0))  # each question with its neighbour's picture
        blind = float(pretrain.loss_of(backbone, unseen, torch.arange(40), looking))
    assert known < 0.2 < blind


def test_the_command_makes_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain, "TEST_QUESTIONS", 5)
    sizes = ["--steps", "6", "--batch", "8", "--lessons", "40"]
    threads = torch.get_num_threads()
    pretrain.main(["--out", str(tmp_path), *sizes])
    torch.set_num_threads(threads)
    made_by = json.loads((tmp_path / "made_by.json").read_text())
    assert made_by["steps"] == 6 and made_by["loss"] < 6.2, "log(512) = 6.24 is what a model that knows nothing pays"
    assert set(made_by["greedy"]) == {"avg", "best", "form", "by_kind"}
    assert load_model(tmp_path, dtype="bf16").dtype == torch.bfloat16
    assert load_encoder(tmp_path).fingerprint() == load_encoder(MODEL_DIRECTORY).fingerprint()
