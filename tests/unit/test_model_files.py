"""Models that are damaged, half downloaded, pickled or full of NaN: one line with the file's name, in every command."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import checkpoint

from mtrl import cli
from mtrl.models.families import load_encoder, load_model_config
from mtrl.models.load_model import load_model

pytestmark = pytest.mark.usefixtures("fake_passes")

FAMILY = "qwen2_5_vl"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(checkpoint(FAMILY), tmp_path / "model")


@pytest.fixture
def sharded(model):
    """The same weights in three files, which an index names."""
    tensors = load_file(model / WEIGHTS)
    names, index = sorted(tensors), {}
    for number in range(3):
        file = f"model-0000{number + 1}-of-00003.safetensors"
        part = {name: tensors[name] for name in names[number::3]}
        save_file(part, model / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (model / WEIGHTS).unlink()
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return model


def load_all(path):
    """As a run does it: settings, tokenizer, weights."""
    load_model_config(str(path))
    load_encoder(path)
    return load_model(path)


def refused(path, message):
    """All loaders raise a ValueError of one line with the path, which the commands print."""
    with pytest.raises(ValueError, match=message) as error:
        load_all(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def half(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_whole_ones_are_loaded(sharded):
    assert torch.equal(load_all(sharded).lm_head.weight, load_model(checkpoint(FAMILY)).lm_head.weight)


# -------------------------------------------------------------------------------------------------------------- weights
@pytest.mark.parametrize("length", [0, 4, 100, 5000, -1000])
def test_truncated_weights(model, length):
    file = model / WEIGHTS
    file.write_bytes(file.read_bytes()[:length])
    refused(model, rf"{WEIGHTS}( is empty)?: it is damaged or half downloaded; get it again")


def test_a_shard_that_is_missing_or_truncated(sharded):
    file = sharded / "model-00002-of-00003.safetensors"
    half(file)
    refused(sharded, r"model-00002-of-00003\.safetensors: it is damaged or half downloaded")
    file.unlink()
    refused(
        sharded, rf"1 of the 3 files of weights that {INDEX} names are missing \(model-00002-of-00003\.safetensors\)"
    )


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a'])
def test_an_index_without_files(sharded, text):
    (sharded / INDEX).write_text(text)
    refused(sharded, f"{INDEX} (names no|holds a|is no)")


def test_weights_that_are_not_there(model):
    (model / WEIGHTS).unlink()
    refused(model, "has no weights: neither")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pth"])
def test_pickled_weights_are_not_read(model, name):
    torch.save(load_file(model / WEIGHTS), model / name)
    load_all(model)  # next to safetensors they do no harm
    (model / WEIGHTS).unlink()
    refused(model, rf"has only pickled weights \({name}\), .* safetensors")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite(model, value):
    tensors = load_file(model / WEIGHTS)
    tensors[sorted(tensors)[0]].view(-1)[0] = value
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})
    refused(model, r"1 weights hold NaN or infinity \(.+\): the training .* use another checkpoint")


# ---------------------------------------------------------------------------------------------------------- other files
FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "generation_config.json"]


@pytest.mark.parametrize("name", FILES)
def test_json_that_is_damaged(model, name):
    file = model / name
    half(file)
    refused(model, rf"{name} is no JSON: it is damaged or half downloaded; get it again \(")
    for content, message in {
        b"": "is empty: it is damaged",
        b"[]": "holds a list, not a JSON object",
        bytes(range(128, 256)): "is no JSON",
        b"[" * 200_000: "is no JSON",
        POINTER: r"is a git-lfs pointer, not the file itself; run `git lfs pull` in ",
    }.items():
        file.write_bytes(content)
        refused(model, rf"{name} {message}")


@pytest.mark.parametrize("name", [WEIGHTS, "chat_template.jinja"])
def test_a_pointer_is_no_file(model, name):
    """As a template it would be read to the model."""
    (model / name).write_bytes(POINTER)
    refused(model, rf"{name} is a git-lfs pointer")


def test_a_pipe_is_not_waited_for(model):
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    refused(model, r"config\.json cannot be read: it is a pipe")


@pytest.mark.parametrize("content", ['{"version": "1.0"}', '{"version": "1.0", "model": {"type": "?"}}'])
def test_json_that_is_no_tokenizer(model, content):
    (model / "tokenizer.json").write_text(content)
    refused(model, "its tokenizer cannot be loaded: ")


@pytest.mark.parametrize(("key", "value"), [("text_config", 3), ("vision_config", {"depth": "many"})])
def test_settings_that_are_of_another_kind(model, key, value):
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {key: value}))
    refused(model, r"config\.json|cannot be loaded")


# ------------------------------------------------------------------------------------------------------------- commands
@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"])
def test_every_command_reports_it_in_one_line(sharded, name, tmp_path, capfd):
    message = "model-00001-of-00003.safetensors" if name == WEIGHTS else name
    half(sharded / message)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "what is it", "answer": "red"}\n')
    words = [f"worker.actor.model.model_path={sharded}", f"dataset.train_files={rows}"]
    for command in (["train", *words, f"training.output_dir={tmp_path}"], ["eval", str(sharded), "--data", str(rows)]):
        assert cli.main(command) == 2
        last = capfd.readouterr().err.splitlines()[-1]
        assert last.startswith(f"mtrl: {sharded / message}") and "damaged or half downloaded" in last
    assert cli.main(["doctor", *words]) == 2
    problems = [line for line in capfd.readouterr().out.splitlines() if "PROBLEM" in line]
    assert len(problems) == 1 and f"{sharded / message}" in problems[0]
