"""A transformers model passed to `mtrl.Trainer` as an object: trained in place, with the numbers of its folder."""

import json
import shutil
import signal

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

import mtrl
from mtrl.config import ConfigError
from mtrl.embedded.embedded_rows import CONFIG_FILE, MODEL_DIRECTORY
from mtrl.tracking.jsonl import read_rows

pytestmark = pytest.mark.usefixtures("no_curves")

ROWS = [{"prompt": f"Say {name}.", "answer": name} for name in ("red", "blue", "green", "pink")]
KEYS = {
    "config": CONFIG_FILE,
    "data": ROWS,
    "val_data": ROWS[:2],
    "max_steps": 2,
    "val_freq": 2,
    "disable_divergence": False,  # a reference with the initial weights
    "rollout_batch_size": 2,
    "global_batch_size": 1,
    "n": 3,
    "max_response_length": 8,
    "logger": [],
}


def short(data):
    return 1.0 / (1 + len(data["response"]))


def load(**options):
    return AutoModelForImageTextToText.from_pretrained(MODEL_DIRECTORY, **{"dtype": torch.float32} | options)


def trainer_of(model, directory, **changes):
    return mtrl.Trainer(model, rewards=short, output_dir=str(directory), experiment_name="run", **KEYS | changes)


def weights(model):
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def numbers(trainer):
    rows = read_rows(trainer.directory / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(("perf/", "time", "attempt"))} for row in rows]


@pytest.fixture(scope="module")
def by_folder(tmp_path_factory):
    trainer = trainer_of(str(MODEL_DIRECTORY), tmp_path_factory.mktemp("folder"))
    trainer.train()
    return trainer


def test_the_object_learns_in_place_with_the_numbers_of_its_folder(by_folder, tmp_path):
    model = load()
    before, trainer = weights(model), trainer_of(model, tmp_path)
    assert trainer.evaluate()["val/reward_score"] == by_folder.history.validations[0]["val/reward_score"]
    trainer.train()
    assert trainer.model is model and not same(before, weights(model))
    assert same(weights(model), weights(by_folder.model)) and numbers(trainer) == numbers(by_folder)
    initial = AutoModelForImageTextToText.from_pretrained(trainer.directory / "initial_model", dtype=torch.float32)
    assert same(initial.state_dict(), before)


def test_a_cell_that_is_run_again_resumes_with_the_same_numbers(by_folder, tmp_path):
    """The reference needs the weights from the start, which the object no longer has."""

    class Stop(mtrl.Callback):
        def rollouts(self, step, experience):
            signal.raise_signal(signal.SIGINT)

    model = load()
    with pytest.raises(KeyboardInterrupt):
        trainer_of(model, tmp_path, callbacks=Stop()).train()
    trainer = trainer_of(model, tmp_path)
    trainer.train()
    assert same(weights(model), weights(by_folder.model)) and numbers(trainer) == numbers(by_folder)
    assert trainer.history[-1]["actor/reference_kl"] != 0
    fresh = load()
    trainer_of(fresh, tmp_path).train()
    assert same(weights(fresh), weights(model)), "a finished run gives the object its weights"
    shutil.rmtree(trainer.directory / "initial_model")
    with pytest.raises(mtrl.StartError, match="initial_model is missing"):
        trainer_of(fresh, tmp_path, max_steps=3).train()


def test_a_processor_brings_its_own_settings(tmp_path):
    class Processor:
        """What MTRL uses of transformers' processors, which need torchvision: they write one file for all settings."""

        image_processor = object()

        def save_pretrained(self, folder):
            AutoTokenizer.from_pretrained(MODEL_DIRECTORY).save_pretrained(folder)
            saved = json.loads((MODEL_DIRECTORY / "preprocessor_config.json").read_text())
            (folder / "processor_config.json").write_text(
                json.dumps({"image_processor": saved | {"image_mean": [0] * 3}})
            )

    trainer = trainer_of(load(), tmp_path, processing_class=Processor())
    assert trainer.model is not None and trainer._loaded.encoder.image_settings.image_mean == (0, 0, 0)


def test_a_tokenizer_is_enough(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIRECTORY)
    tokenizer.add_tokens(["<extra>"])
    trainer = trainer_of(load(), tmp_path, processing_class=tokenizer)
    assert trainer.model is not None and "<extra>" in trainer._loaded.encoder.tokenizer.get_vocab()
    assert trainer._loaded.encoder.image_settings is not None, "of the checkpoint that the model was loaded from"


def test_without_a_processor_it_is_asked_for(tmp_path):
    model = load()
    model.name_or_path = ""
    with pytest.raises(ValueError, match="processing_class: pass the processor or tokenizer"):
        trainer_of(model, tmp_path).evaluate()


def test_conversions_are_reported(tmp_path, caplog):
    model = load(dtype=torch.bfloat16, attn_implementation="eager")
    model.model.visual.requires_grad_(False)
    assert trainer_of(model, tmp_path).model is model and model.dtype == torch.float32
    assert "converted in place from bfloat16 to float32" in caplog.text and "weights are frozen" in caplog.text
    assert model.model.language_model.config._attn_implementation == "mtrl_sdpa", "as for a model that is loaded"


@pytest.mark.parametrize(
    ("change", "keys", "message"),
    [
        (lambda model: model.model, {}, "has no output layer"),
        (lambda model: torch.nn.Sequential(model), {}, "pass the transformers model inside it"),
        (lambda model: setattr(model, "is_quantized", True), {}, "its weights are quantized"),
        (lambda model: model.model.visual.to("meta"), {}, "its weights are on cpu, meta"),
        (lambda model: setattr(model.config, "model_type", "t5"), {}, "is of the family 't5'"),
        (lambda model: None, {"n_gpus_per_node": 2}, "an object is trained in place"),
        (lambda model: None, {"cpu_offload": True}, "an object is trained in place; for several processes or cpu_off"),
        (lambda model: None, {"peft_type": "lora"}, "adapters .peft_type. need the name of their base"),
    ],
)
def test_what_cannot_be_trained_in_place_is_refused_at_once(tmp_path, change, keys, message):
    model = load()
    changed = change(model)
    with pytest.raises((TypeError, ConfigError), match=message):
        trainer_of(changed if changed is not None and changed is not model.model.visual else model, tmp_path, **keys)
    assert not any(tmp_path.iterdir())
