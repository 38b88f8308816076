"""`mtrl.Trainer` before, while and after it trains: one small run of the embedded model on rows of a script."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel

import mtrl
from mtrl.checkpoint.manifest import check_manifest
from mtrl.cli import main
from mtrl.config import ConfigError, load_config
from mtrl.tracking.jsonl import read_rows

pytestmark = pytest.mark.usefixtures("no_curves")

COLOURS = ("red", "blue", "green", "pink")
ROWS = [{"prompt": f"Say {name}.", "answer": name, "kind": name[0]} for name in COLOURS]
SIZES = {"rollout_batch_size": 2, "global_batch_size": 1, "n": 3, "max_response_length": 8, "logger": [], "val_freq": 2}


def short(data):
    return 1.0 / (1 + len(data["response"]))


def trainer_in(directory, **changes):
    """A trainer with a reference, whose weights must be the initial ones also after a resume."""
    keys = {"rewards": short, "data": ROWS, "val_data": ROWS[:2], "max_steps": 2, "disable_divergence": False}
    return mtrl.Trainer(output_dir=str(directory), experiment_name="rows", **SIZES, **keys | changes)


def copy_weights(trainer):
    return {name: weight.clone() for name, weight in trainer.model.state_dict().items()}


def same_weights(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trainer after training, and its evaluation before."""
    trainer = trainer_in(tmp_path_factory.mktemp("trained"))
    model, before, weights = trainer.model, trainer.evaluate(), copy_weights(trainer)
    assert trainer.history == [] and not trainer.directory.exists(), "evaluation writes nothing"
    assert trainer.train() == trainer.directory
    return trainer, model, before, weights


def test_the_model_is_one_object_that_learns(trained):
    trainer, model, _, before = trained
    assert isinstance(model, PreTrainedModel) and trainer.model is model
    assert not same_weights(before, copy_weights(trainer))
    newest = trainer.directory / "checkpoints" / "step_2"
    saved = AutoModelForImageTextToText.from_pretrained(newest).state_dict()
    assert same_weights(saved, copy_weights(trainer))
    ids = torch.tensor([[5, 6, 7]])
    said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    assert said.shape[1] > 3, "plain transformers can use it"


def all_rows(trainer):
    return read_rows(trainer.directory / "metrics.jsonl")


def test_history_is_metrics_jsonl_with_the_validations_apart(trained):
    trainer, _, before, _ = trained
    history, rows = trainer.history, all_rows(trainer)
    assert [(row["step"], "actor/pg_loss" in row) for row in rows] == [(0, False), (1, True), (2, True), (2, False)]
    assert history == rows[1:3] and history.validations == [rows[0], rows[3]]
    first = {name: value for name, value in before.items() if not name.startswith("perf/")}
    assert first.items() <= history.validations[0].items(), "training started from the evaluated model"


def test_history_as_a_table(trained, monkeypatch):
    trainer, *_ = trained
    steps, validations = trainer.history.to_pandas(), trainer.history.validations.to_pandas()
    assert steps["step"].tolist() == [1, 2] and steps["actor/grad_norm"].notna().all()
    assert validations["step"].tolist() == [0, 2] and validations["val/reward_score"].notna().all()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"to_pandas\(\) needs pandas: pip install pandas"):
        trainer.history.to_pandas()


def test_evaluate_judges_the_weights_of_now(trained):
    trainer, *_ = trained
    after, last = trainer.evaluate(), trainer.history.validations[-1]
    assert after["val/reward_score"] == last["val/reward_score"] and after.keys() <= last.keys()
    other = trainer.evaluate([{"prompt": "Say nothing at all.", "answer": ""}])
    assert other["val/reward_score"] != after["val/reward_score"]
    assert len(all_rows(trainer)) == 4, "and writes nothing"


def test_evaluate_wants_something_to_evaluate_on(trained):
    trainer, *_ = trained
    bare = mtrl.Trainer(data=ROWS, rewards=short, output_dir=str(trainer.directory / "none"))
    with pytest.raises(ConfigError, match="val_data="):
        bare.evaluate()
    with pytest.raises(TypeError, match="val_data: a file, a list of rows"):
        trainer.evaluate(3)


def test_save_writes_a_checkpoint_that_transformers_loads(trained, tmp_path):
    trainer, *_ = trained
    place = trainer.save(tmp_path / "deep" / "model")
    assert place == trainer.save(place), "an earlier one is replaced"
    assert os.listdir(place.parent) == ["model"]
    check_manifest(place)
    model = AutoModelForImageTextToText.from_pretrained(place)
    assert same_weights(model.state_dict(), copy_weights(trainer))
    given = AutoTokenizer.from_pretrained(trainer.directory / "checkpoints" / "step_2")
    assert AutoTokenizer.from_pretrained(place).get_vocab() == given.get_vocab()
    assert mtrl.Trainer(place, output_dir=str(tmp_path), max_pixels=3136, min_pixels=3136).model.num_parameters() > 0


def test_save_does_not_change_other_files(trained, tmp_path):
    trainer, *_ = trained
    (tmp_path / "thesis.tex").write_text("years of work")
    for place in (tmp_path, tmp_path / "thesis.tex", trainer.directory / "checkpoints" / "step_2"):
        with pytest.raises(FileExistsError, match="name a new folder"):
            trainer.save(place)
    assert os.listdir(tmp_path) == ["thesis.tex"]
    assert trainer.save(tmp_path / "new").is_dir()


def test_training_again_reports_that_it_is_finished(trained, caplog):
    trainer, *_ = trained
    weights = copy_weights(trainer)
    assert trainer.train() == trainer.directory and "is finished: step 2 of 2" in caplog.text
    assert same_weights(weights, copy_weights(trainer)) and len(all_rows(trainer)) == 4


def test_another_trainer_of_the_run_begins_where_it_is(trained):
    trainer, *_ = trained
    again = trainer_in(trainer.directory.parent.parent)
    assert again.history == trainer.history
    assert same_weights(copy_weights(again), copy_weights(trainer))
    assert again.evaluate()["val/reward_score"] == trainer.history.validations[-1]["val/reward_score"]


def test_another_configuration_is_an_error_everywhere(trained):
    trainer, *_ = trained
    other = trainer_in(trainer.directory.parent.parent, lr=0.5)
    for look in (lambda: other.history, lambda: other.model, other.evaluate, other.train):
        with pytest.raises(mtrl.StartError) as caught:
            look()
        assert "\n  lr (worker.actor.optim.lr): was 0.0001, is 0.5" in str(caught.value)
        assert "choose another experiment_name (training.experiment_name)" in str(caught.value)


def test_overwrite_starts_anew_and_keeps_the_earlier_run_aside(trained, tmp_path, capsys):
    """As when a cell of a notebook is run again with another learning rate."""
    shutil.copytree(trained[0].directory.parents[1], tmp_path, dirs_exist_ok=True)
    again = trainer_in(tmp_path, lr=2e-5, overwrite=True)
    aside = again.directory.with_name("rows.old")
    assert f"the earlier run of this name is now {aside}" in capsys.readouterr().err
    assert again.history == [] and len(read_rows(aside / "metrics.jsonl")) == len(all_rows(trained[0]))
    assert trainer_in(tmp_path, lr=3e-5, overwrite=True).history == [], "nothing there is no error"


def test_a_reward_with_wrong_parameters_is_named(tmp_path):
    def compare_with(first, second):
        return 1.0

    with pytest.raises(mtrl.StartError, match=r"the reward function compare_with: it cannot be called as f\(data\)"):
        trainer_in(tmp_path, rewards=compare_with).train()


def test_responses_are_shown_and_runs_compared(trained):
    trainer, *_ = trained
    view = trainer.view(step=1)
    assert view._repr_html_().count("<span") == sum(len(one["pieces"]) for one in view.responses)
    with pytest.raises(ValueError, match="step 3 is not recorded; there are 1 to 2"):
        trainer.view(step=3)
    assert "by reward, validation" in repr(trainer.compare(trainer))


def test_the_saved_configuration_names_the_objects_of_the_script(trained, capsys):
    trainer, *_ = trained
    saved = load_config(trainer.directory / "config.yaml", saved=True)
    assert saved.dataset.train_files == saved.dataset.val_files == "python:rows"
    assert saved.reward_functions == ("python:short",)
    for words in (["eval", str(trainer.directory)], ["train", str(trainer.directory / "config.yaml")]):
        assert main(words) == 2
        assert "that a script gave to mtrl.Trainer; run it again, or name a file" in capsys.readouterr().err


class Stop(mtrl.Callback):
    """Ctrl-C in the first step, once."""

    def __init__(self):
        self.seen, self.closed = [], 0

    def rollouts(self, step, experience):
        self.seen.append(step)
        if self.seen == [1]:
            signal.raise_signal(signal.SIGINT)

    def close(self):
        self.closed += 1


def test_training_resumes_after_an_interrupt_with_the_same_numbers(trained, tmp_path):
    """The reference has the initial weights, although the model has learnt by then."""
    whole, *_ = trained
    stop = Stop()
    trainer = trainer_in(tmp_path, callbacks=stop)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    model = trainer.model.train()
    for parameter in model.parameters():  # as an error in the middle of an update leaves them
        parameter.grad = torch.ones_like(parameter)
    assert stop.seen == [1] and [row["step"] for row in all_rows(trainer)] == [0, 1]
    trainer.train()
    assert stop.seen == [1, 2] and stop.closed == 2 and trainer.model is model
    assert same_weights(copy_weights(trainer), copy_weights(whole))
    last = [
        {k: v for k, v in t.history[-1].items() if not k.startswith(("perf/", "time", "attempt"))}
        for t in (trainer, whole)
    ]
    assert last[0] == last[1] and last[0]["actor/reference_kl"] != 0


@pytest.mark.parametrize("step", [1, 2])
def test_a_callback_that_fails_costs_no_row(trained, tmp_path, step):
    """After a resume metrics.jsonl has the rows of an undisturbed run, each once; the last step is validated too."""

    class Fail(mtrl.Callback):
        def rollouts(self, number, experience):
            if number == step:
                raise ValueError("no room for the responses")

    whole, *_ = trained
    with pytest.raises(ValueError, match="no room"):
        trainer_in(tmp_path, callbacks=Fail()).train()
    trainer = trainer_in(tmp_path)
    trainer.train()
    rows = all_rows(trainer)
    assert [numbers(row) for row in rows] == [numbers(row) for row in all_rows(whole)]
    assert [row["attempt"] for row in rows] == ([1, 1, 2, 2] if step == 1 else [1, 1, 1, 2])
    trainer.train()
    assert all_rows(trainer) == rows, "it is finished now"


def numbers(row):
    return {name: value for name, value in row.items() if not name.startswith(("perf/", "time", "attempt"))}


def test_the_examples_of_the_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs/python.md").read_text(), re.DOTALL)
    exec(compile(code, "python.md", "exec"), {})
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[1:3]] == ["1", "2"] and len(said) == 5, "its callback was called"
    assert Path("colours_model/config.json").exists()


def test_a_raised_limit_resumes_and_other_rows_do_not(trained, tmp_path):
    first = trainer_in(tmp_path, max_steps=1)
    first.train()
    with pytest.raises(ValueError, match="data"):
        trainer_in(tmp_path, data=[*ROWS, {"prompt": "Say grey.", "answer": "grey"}]).train()
    more = trainer_in(tmp_path)
    more.train()
    assert same_weights(copy_weights(more), copy_weights(trained[0]))
    assert json.loads((tmp_path / "mtrl/rows/checkpoints/step_2/trainer_state.json").read_text())["step"] == 2
