"""Arguments of `mtrl.Trainer`: keys by their last names, and objects of the right kinds. No model is loaded here."""

import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from PIL import Image

import mtrl
from mtrl.compose.task_source import open_data_sources
from mtrl.config import ConfigError
from mtrl.config.tree import known_leaves
from mtrl.protocols import Tracker
from mtrl.training.trainer_arguments import SHORT_NAMES, TRL_NAMES, config_keys

ROWS = [{"prompt": "Say red.", "answer": "red"}, {"prompt": "Say blue.", "answer": "blue"}]


def short(sample):
    return 1.0


# -------------------------------------------------------------------------------------------------------- the package
def test_the_package_offers_what_users_import():
    assert dir(mtrl) == sorted(mtrl.__all__) and {*mtrl._SOURCES, "__version__"} == set(mtrl.__all__)
    assert mtrl.Callback is Tracker, "one class, under both names"
    assert all(getattr(mtrl, name) is not None for name in mtrl.__all__)
    assert mtrl.__version__.split(".")[0].isdecimal()
    with pytest.raises(AttributeError, match=r"no attribute 'Trainr'.*Trainer"):
        mtrl.Trainr  # noqa: B018


def test_importing_the_package_loads_no_torch():
    message = "import sys, mtrl; dir(mtrl); mtrl.__version__; print('torch' in sys.modules, 'numpy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", message], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]


# --------------------------------------------------------------------------------------------------------------- keys
VALUES = {
    "lr": 3e-5,
    "weight_decay": 0.5,
    "betas": (0.5, 0.75),
    "warmup_steps": 7,
    "warmup_ratio": 0.25,
    "lr_scheduler_type": "cosine",
    "min_lr_ratio": 0.125,
    "n": 5,
    "temperature": 0.7,
    "seed": 11,
    "model_path": "some/model",
    "offload_params": False,
}


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_a_name_that_several_keys_end_in_means_the_actors_and_the_rollouts(name):
    ending = [key for key in known_leaves() if key.rpartition(".")[2] == name]
    assert len(ending) > 1 and set(SHORT_NAMES[name]) <= set(ending), "or the table has an entry too many"
    plain, config = mtrl.Trainer().config, mtrl.Trainer(**{name: VALUES[name]}).config
    for key in ending:
        meant = VALUES[name] if key in SHORT_NAMES[name] else attrgetter(key)(plain)
        if name != "model_path" or key in SHORT_NAMES[name]:  # with a model the embedded settings do not apply
            assert attrgetter(key)(config) == meant, key


def test_the_policy_is_meant_and_one_seed_is_for_all():
    trainer = mtrl.Trainer(lr=3e-5, n=5, warmup_steps=7, temperature=0.7, seed=11)
    actor, rollout = trainer.config.worker.actor, trainer.config.worker.rollout
    assert (actor.optim.lr, actor.optim.warmup_steps, rollout.n, rollout.temperature) == (3e-5, 7, 5, 0.7)
    assert (trainer.config.dataset.seed, rollout.seed) == (11, 11)
    assert (rollout.val.n, rollout.val.temperature, trainer.config.worker.critic.optim.lr) == (1, 0.0, 1e-5)


def test_the_page_has_the_same_table():
    page = (Path(__file__).parents[2] / "docs/python.md").read_text()
    message = {
        name: tuple(re.findall(r"`(.*?)`", keys))
        for name, keys in re.findall(r"^\| `(\w+)` \| (`\w+\..*) \|$", page, re.M)
    }
    assert message == SHORT_NAMES


def test_other_last_names():
    assert config_keys("max_steps") == ("training.max_steps",) and config_keys("a.b") == ("a.b",)
    assert config_keys("encoder") == ("worker.actor.model.encoder",), "an old name; the loader says the new one"
    assert mtrl.Trainer(worker={"rollout": {"n": 3}}).config.worker.rollout.n == 3
    with pytest.raises(ConfigError, match=r"name: several keys end so; write one of worker\.actor\.optim\.name, "):
        mtrl.Trainer(name="first")
    with pytest.raises(ConfigError, match=r"lr.*set a second time"):
        mtrl.Trainer(**{"worker.actor.optim.lr": 1e-5, "lr": 2e-5})
    with pytest.raises(ConfigError, match=r"model: sets worker\.actor\.model\.model_path, which is set a second time"):
        mtrl.Trainer("some/model", model_path="some/other")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"max_step": 3}, "did you mean max_steps (training.max_steps)?"),
        ({"learning_rate": 1e-6}, "worker.actor.optim.lr"),
        ({"num_generations": 8}, "worker.rollout.n"),
        ({"max_steps": "ten"}, "max_steps (training.max_steps): expected a whole number"),
        ({"lr": -1.0}, "lr (worker.actor.optim.lr): "),
        ({"callbacks": [], "seed": "x"}, "seed (dataset.seed): "),
        ({"engine_kwargs": {"max_num_seqs": 8}}, "not supported with"),
        ({"logger": ["trackoi"]}, "training.logger"),
        ({"perturbation": "thunder"}, "random_patch_blackening"),
        ({"rewards": "acuracy"}, "did you mean accuracy"),
        *(({name: object()}, f"{name}: called {here}") for name, here in TRL_NAMES.items()),
    ],
)
def test_wrong_keys_fail_in_the_constructor(keys, message):
    with pytest.raises(ConfigError) as caught:
        mtrl.Trainer(**keys)
    assert message in str(caught.value)


def test_a_configuration_made_in_python(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("worker: {actor: {optim: {lr: 2e-6}}}\ntraining: {max_steps: 3}\n")
    content = {"worker": {"actor": {"optim": {"lr": 2e-6}}}, "training": {"max_steps": 3}}
    of_file, of_keys = mtrl.Trainer(config=file, model="m", n=4), mtrl.Trainer(config=content, model="m", n=4)
    assert of_file.config == of_keys.config and of_keys.config.worker.rollout.n == 4
    again = mtrl.Trainer(config=of_keys.config, lr=1e-5).config
    assert (again.training.max_steps, again.worker.actor.optim.lr, again.worker.rollout.n) == (3, 1e-5, 4)
    with pytest.raises(ConfigError, match="worker: a section of config= and an argument too"):
        mtrl.Trainer(config=content, worker={"rollout": {"n": 4}})


def test_doubtful_settings_are_reported(caplog):
    mtrl.Trainer(**{"worker.rollout.val.n": 4})
    assert "all greedy responses are the same" in caplog.text


# ------------------------------------------------------------------------------------------------------------- objects
@pytest.mark.parametrize("rewards", [short, [short], (short,)])
def test_one_function(rewards):
    reward = mtrl.Trainer(rewards=rewards).config.worker.reward
    assert reward.functions == ("python:short",) and reward.weights is None


@pytest.mark.parametrize("rewards", ["length", ["length"]])
def test_one_name(rewards):
    assert mtrl.Trainer(rewards=rewards).config.reward_functions == ("length",)


def test_rewards_bring_their_own_weights(tmp_path):
    """Weights of a file belong to its functions; they would be an error or apply to another function."""
    file = tmp_path / "run.yaml"
    file.write_text("worker: {reward: {reward_fn_path: my.py, early_weights: [1.0]}}\n")
    reward = mtrl.Trainer("m", config=file, rewards=["accuracy", short], weights=[1.0, 0.5]).config.worker.reward
    assert (reward.reward_fn_path, reward.early_weights, reward.weights) == (None, None, (1.0, 0.5))


@pytest.mark.parametrize("data", ["train.jsonl", Path("train.jsonl")])
def test_data_by_path(data):
    config = mtrl.Trainer("m", data, val_data=data).config
    assert config.dataset.train_files == config.dataset.val_files == "train.jsonl"


@pytest.mark.parametrize("data", [ROWS, tuple(ROWS), Dataset.from_list(ROWS)])
def test_rows_have_a_name_in_the_configuration(data):
    config = mtrl.Trainer(data=data, val_data=data).config
    assert config.dataset.train_files == config.dataset.val_files == "python:rows"


@pytest.mark.parametrize(
    "keys",
    [
        {"train_files": "python:rows"},
        {"val_files": "python:rows", "data": ROWS},
        {"functions": ["python:short"], "weights": None},
    ],
)
def test_objects_of_a_script_are_required(keys):
    with pytest.raises(ConfigError, match=r"that a script gave to mtrl\.Trainer; run it again"):
        mtrl.Trainer(**keys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 3}, "model: a hub id, a folder or a transformers model, got int"),
        ({"model": "m", "processing_class": 3}, "tokenizer_path= names another tokenizer"),
        ({"data": {"prompt": ["a"]}}, "data: a file, a list of rows (dicts) or a datasets.Dataset, got a dict"),
        ({"data": short}, "got the function short; functions are for rewards="),
        ({"data": (row for row in ROWS)}, "got a generator"),
        ({"data": DatasetDict({"test": Dataset.from_list(ROWS)})}, "choose a split: data=dataset['test']"),
        ({"data": IterableDataset.from_generator(lambda: iter(ROWS))}, "it has no length"),
        ({"data": Dataset.from_list(ROWS).to_pandas()}, "data=frame.to_dict('records')"),
        ({"data": ["a.jsonl", "b.jsonl"]}, "one text with commas: data='a.jsonl,b.jsonl'"),
        ({"data": [*ROWS, 3]}, "data: row 2 is an int; a row is a dict"),
        ({"data": []}, "data: no rows"),
        ({"data": ""}, "data: an empty text"),
        ({"val_data": 7}, "val_data: a file, a list of rows"),
        ({"rewards": []}, "rewards: an empty list"),
        ({"rewards": [3]}, "rewards: a built-in's name, 'file.py:name' or a function, got an int"),
        ({"rewards": {"short": short}}, "got a dict"),
        ({"rewards": "python:short"}, "pass the function itself"),
        ({"callbacks": [short]}, "inherits from mtrl.Callback, got the function short"),
        ({"callbacks": Tracker}, "mtrl.Callback is a class; pass an instance: mtrl.Callback(..)"),
        ({"callbacks": None}, "got None"),
        ({"config": 3}, "config: a YAML file, a mapping of keys or another trainer's config, got an int"),
    ],
)
def test_wrong_types_get_one_clear_line(arguments, message):
    with pytest.raises(TypeError) as caught:
        mtrl.Trainer(**arguments)
    assert message in str(caught.value) and "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------------ datasets
def images(*colours):
    return [{"prompt": f"<image>{colour}?", "image": Image.new("RGB", (8, 8), colour)} for colour in colours]


def test_a_dataset_is_read_in_its_order_with_its_images_as_they_are_stored():
    whole = Dataset.from_list(images("red", "blue", "green"))
    (source,) = open_data_sources(whole.select([2, 0]), "train")
    assert [source.read(i)["prompt"] for i in range(len(source))] == ["<image>green?", "<image>red?"]
    assert source.read(0)["image"]["bytes"].startswith(b"\x89PNG"), "decoding all of them would fill the memory"
    (same,), (other,) = (
        open_data_sources(whole.select([2, 0]), "train"),
        open_data_sources(whole.select([0, 2]), "train"),
    )
    assert source.fingerprint == same.fingerprint != other.fingerprint


def test_a_datasets_own_transform_is_heeded():
    def shout(batch):
        return {"prompt": [prompt.upper() for prompt in batch["prompt"]]}

    (source,) = open_data_sources(Dataset.from_list(ROWS).with_transform(shout), "train")
    assert source.read(1) == {"prompt": "SAY BLUE."}
