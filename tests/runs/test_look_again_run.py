"""A run with an environment, and what `mtrl tools` says of its checkpoints."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mtrl.cli import main
from mtrl.compose.environments import blank_messages
from mtrl.embedded.embedded_rows import CONFIG_FILES, MODEL_DIRECTORY
from mtrl.embedded.look_again import make_question, row
from mtrl.models.families import load_encoder
from mtrl.tracking.jsonl import read_rows
from pretraining.pretrain import CURRICULA, make_start

QUESTIONS = 4


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """The settings of the task for a tiny random model and four questions."""
    folder = tmp_path_factory.mktemp("look_again")
    tiny = {"hidden": 16, "layers": 2, "heads": 2, "kv_heads": 1, "vision_hidden": 16, "vision_layers": 2}
    curriculum = replace(CURRICULA["lookagain"], model_shape=tiny)
    start = make_start(str(folder / "model"), "qwen2_5_vl", curriculum, seed=0)
    with (folder / "rows.jsonl").open("w") as file:
        for index in range(QUESTIONS):
            question = row(make_question("train", index))
            (picture,) = question.pop("images")
            picture.save(folder / f"{index}.png")
            file.write(json.dumps(question | {"images": [f"{index}.png"]}) + "\n")
    data = folder / "rows.jsonl"
    return (
        f"worker.actor.model.model_path={start}", f"dataset.train_files={data}", f"dataset.val_files={data}",
        "worker.rollout.environment_processes=1", "training.val_freq=-1", f"training.output_dir={folder}",
        "training.logger=[]",
    )  # fmt: skip


def test_it_trains_and_its_tools_are_measured(words, capsys):
    small = ("training.max_steps=2", "training.save_freq=1", "training.save_limit=-1", "dataset.rollout_batch_size=2",
             "worker.actor.global_batch_size=2", "worker.rollout.n=2", "dataset.max_response_length=24")  # fmt: skip
    assert main(["train", str(CONFIG_FILES["lookagain"]), *words, *small]) == 0
    run = Path(words[5].removeprefix("training.output_dir=")) / "mtrl/lookagain"
    entries = read_rows(run / "metrics.jsonl")
    turns = [entry["tools/turns"] for entry in entries if "tools/turns" in entry]
    assert turns == [1, 1], "of two steps; a random model calls nothing"
    capsys.readouterr()
    assert main(["tools", str(run)]) == 0
    shown, line = capsys.readouterr().out.strip().rsplit("\n", 1)
    measured = json.loads(line)
    assert [path.rsplit("/", 1)[1] for path in measured] == ["step_1", "step_2"]
    assert all(each["questions"] == QUESTIONS and each["with_tools"] == 0 for each in measured.values())
    assert shown.count("\n") == 3 and "step_1 | 0.000 |" in shown


def test_a_run_without_an_environment_has_no_tools_to_measure(capsys):
    assert main(["tools", "zoo"]) == 2
    assert "worker.rollout.environment" in capsys.readouterr().err


def test_blank_messages_have_the_tokens_and_not_the_pixels():
    encoder = load_encoder(MODEL_DIRECTORY)
    content = ["here: ", np.random.default_rng(0).integers(0, 256, (56, 84, 3), np.uint8)]
    seen, blank = (
        each.encode_message(content, encoder.stop_ids[0], "1") for each in (encoder, blank_messages(encoder))
    )
    assert seen.ids.tolist() == blank.ids.tolist() and (blank.media[0] == 127).all()
    assert seen.media[0].std() > 25 and seen.media[0].shape == blank.media[0].shape
