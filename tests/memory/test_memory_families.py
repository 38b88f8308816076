"""The memory estimate of families whose towers are not Qwen's: sizes, images, `mtrl doctor`, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from mtrl import cli
from mtrl.memory.fake_model import FakeModel, NotEstimated
from mtrl.memory.plan import Plan
from mtrl.memory.preflight import Limits, longest_prompt
from mtrl.models.families import FAMILIES, find_family, load_encoder, load_model_config
from mtrl.models.load_model import load_model
from mtrl.models.model_size import model_size
from mtrl.types import Needs, Sampling
from mtrl.workers.micro_batches import MicroBatching
from pretraining.tiny_checkpoints import make_tiny_checkpoint

OTHER_TOWERS = ["gemma3", "internvl", "idefics3", "smolvlm", "glm4v"]
LIMITS = Limits(
    prompts=2, prompts_per_update=2, sampling=Sampling(n=2, max_new_tokens=8), prompt_tokens=200, max_pixels=168**2,
    update=MicroBatching(rows=2), probe=MicroBatching(rows=2), needs=Needs("old_logprobs"),
)  # fmt: skip


@pytest.fixture(scope="module", params=OTHER_TOWERS)
def path(request, tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), request.param))


def make_plan(path: str, **settings) -> Plan:
    return Plan(LIMITS, make_encoder=lambda max_pixels: load_encoder(path, max_pixels=max_pixels), **settings)


def test_sizes_without_weights(path):
    real, config = load_model(path), load_model_config(path)
    assert model_size(FakeModel(config, make_plan(path)).model) == model_size(real)
    frozen = model_size(FakeModel(config, make_plan(path, train_vision=False)).model)
    tower = sum(p.numel() for p in find_family(config).find_vision_tower(real).parameters())
    assert sum(frozen.learning) == frozen.parameters - tower


def test_the_largest_image(path):
    """It has the shapes that the checkpoint's encoder gives it, and none of its numbers."""
    encoder = load_encoder(path, max_pixels=LIMITS.max_pixels)
    fake = FakeModel(load_model_config(path), make_plan(path))
    real, prompt = longest_prompt(encoder, LIMITS), longest_prompt(fake.encoder, LIMITS)
    assert len(prompt.ids) == len(real.ids) == LIMITS.prompt_tokens
    inputs = fake.encoder.inputs(prompt)
    assert inputs["pixel_values"].shape == encoder.inputs(real)["pixel_values"].shape
    assert type(inputs["pixel_values"]) is not torch.Tensor
    fake.cut(1, 1)
    assert len(fake.blocks) == 2 and len(find_family(load_model_config(path)).find_vision_layers(fake.model)) == 1


def test_doctor_prints_an_estimate(path, tmp_path, capsys):
    Image.fromarray(np.zeros((64, 80, 3), np.uint8)).save(tmp_path / "a.png")
    row = {"prompt": "<image>What is it?", "images": ["a.png"], "answer": "A"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    settings = {
        "worker": {"actor": {"model": {"model_path": path}, "global_batch_size": 2}},
        "dataset": {"train_files": str(tmp_path / "rows.jsonl"), "image_dir": str(tmp_path), "rollout_batch_size": 2},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    cli.main(["doctor", str(tmp_path / "run.yaml"), "dataset.max_prompt_length=512", "dataset.max_response_length=32"])
    said = capsys.readouterr().out
    assert "measured on fake tensors" in said and "not estimated" not in said, said


def test_fewer_pixels_are_fewer_tiles(tmp_path):
    """The encoder is made for the limit of each estimate, as savings need it."""
    path = str(make_tiny_checkpoint(tmp_path, "smolvlm"))
    config, plan = load_model_config(path), make_plan(path)
    plans = [replace(plan, limits=replace(LIMITS, max_pixels=tiles * 56**2)) for tiles in (10, 5)]
    fakes = [FakeModel(config, each) for each in plans]
    images = [longest_prompt(fake.encoder, each.limits).media[0].shape for fake, each in zip(fakes, plans, strict=True)]
    assert images == [(168, 168, 3), (112, 112, 3)]


def test_what_is_not_estimated_says_why(tmp_path, monkeypatch):
    path = str(make_tiny_checkpoint(tmp_path, "internvl"))
    config = load_model_config(path)
    with pytest.raises(NotEstimated, match="without the checkpoint's tokenizer and image settings"):
        FakeModel(config, Plan(LIMITS))
    monkeypatch.delitem(FAMILIES, "internvl")
    with pytest.raises(NotEstimated, match="'internvl', which is not described, is not estimated; a run measures it"):
        FakeModel(config, make_plan(path))
