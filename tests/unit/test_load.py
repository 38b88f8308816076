"""A model is loaded whole: transformers would put random numbers where a checkpoint's weights do not fit."""

import json
import re
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import TINY_FAMILIES, checkpoint, plain_model
from transformers.utils import logging

from mtrl import cli
from mtrl.embedded.embedded_rows import MODEL_DIRECTORY
from mtrl.models.load_model import DTYPES, empty_model, load_model

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


@pytest.fixture
def changed(tmp_path):
    """Rewrites the qwen2 checkpoint with its tensors changed by a function."""

    def change(tensors_of):
        directory = tmp_path / "model"
        shutil.copytree(checkpoint("qwen2"), directory)
        save_file(
            tensors_of(load_file(directory / "model.safetensors")),
            directory / "model.safetensors",
            metadata={"format": "pt"},
        )
        return directory

    return change


def without(tensors, *names):
    return {name: tensor for name, tensor in tensors.items() if name not in names}


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_every_family_loads_with_the_weights_of_the_file(family):
    stored = load_file(checkpoint(family) / "model.safetensors")
    assert not any("lm_head" in name for name in stored), "tied to the embedding, so it is not stored"
    loaded = load_model(checkpoint(family)).state_dict()
    assert "lm_head.weight" in loaded
    for name, tensor in plain_model(family).state_dict().items():
        assert torch.equal(loaded[name], tensor), name


def test_the_embedded_model_loads():
    assert load_model(MODEL_DIRECTORY).device.type == "cpu"


def test_a_tied_head_that_is_stored_is_no_fault(changed):
    load_model(changed(lambda tensors: tensors | {"lm_head.weight": tensors[EMBEDDING].clone()}))


def test_renamed_weights_are_an_error(changed):
    """As another framework writes them."""
    renamed = changed(lambda tensors: {name.replace("model.", "net."): tensor for name, tensor in tensors.items()})
    with pytest.raises(
        ValueError, match=r"do not fit .*: \d+ missing \(.*, \.\.\), \d+ unknown \(net\..*\); training"
    ) as message:
        load_model(renamed)
    assert "\n" not in str(message.value) and str(renamed) in str(message.value)


@pytest.mark.parametrize(
    ("name", "message"), [(NORM, f"1 missing ({NORM})"), (EMBEDDING, f"lm_head.weight, {EMBEDDING}")]
)
def test_a_missing_weight_is_named(changed, name, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_model(changed(lambda tensors: without(tensors, name)))


def test_an_extra_weight_is_named(changed):
    with pytest.raises(ValueError, match=r": 1 unknown \(score\.weight\);"):
        load_model(changed(lambda tensors: tensors | {"score.weight": torch.ones(1, 64)}))


def test_a_weight_of_another_size_is_named(changed):
    with pytest.raises(ValueError, match=rf": 1 of another size \({NORM}\);"):
        load_model(changed(lambda tensors: tensors | {NORM: torch.ones(32)}))


def test_a_config_of_another_depth_is_an_error(changed):
    directory = changed(dict)
    config = json.loads((directory / "config.json").read_text())
    config["num_hidden_layers"] += 1
    config["layer_types"] = [*config["layer_types"], config["layer_types"][0]]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"12 missing \(model\.layers\.\d+\.input_layernorm\.weight, .*, \.\.\);"):
        load_model(directory)


def test_train_reports_it_in_one_line(changed, tmp_path, capfd):
    directory = changed(lambda tensors: without(tensors, NORM))
    level = logging.get_verbosity()
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "what is it", "answer": "red"}\n')
    words = [f"worker.actor.model.model_path={directory}", f"dataset.train_files={rows}"]
    assert cli.main(["train", *words, f"training.output_dir={tmp_path}"]) == 2
    said = capfd.readouterr().err
    assert f"mtrl: {directory}: the weights do not fit" in said and "LOAD REPORT" not in said
    assert logging.get_verbosity() == level


def test_several_threads_may_load_at_once():
    """transformers changes torch's default dtype and initialisers while it loads."""
    path, barrier, faults = checkpoint("qwen2_5_vl"), threading.Barrier(3), []
    initialisers = {name: getattr(torch.nn.init, name) for name in dir(torch.nn.init) if name.endswith("_")}

    def work(load, dtype):
        barrier.wait()
        for _ in range(4):
            try:
                if next(load(path, dtype=dtype).parameters()).dtype != DTYPES[dtype]:
                    faults.append(f"{dtype} was loaded as another")
            except ValueError as error:
                faults.append(str(error))

    threads = [
        threading.Thread(target=work, args=each)
        for each in ((load_model, "bf16"), (load_model, "fp32"), (empty_model, "bf16"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults and torch.get_default_dtype() == torch.float32
    assert all(getattr(torch.nn.init, name) is function for name, function in initialisers.items())
