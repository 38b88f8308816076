"""Real runs that resume: from where they stopped, from others, past damage."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
import yaml
from run_helpers import SETTINGS, STEPS, get_run_dir, read_metrics, read_tensors, same_end, tiny_arguments

import mtrl
from mtrl.checkpoint.folder_store import list_checkpoints, read_state
from mtrl.checkpoint.manifest import check_manifest
from mtrl.cli import main
from mtrl.embedded.task import make_question
from mtrl.tracking.jsonl import read_rows
from mtrl.training.resume import find_start


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The output folder of an undisturbed run."""
    output = tmp_path_factory.mktemp("whole")
    assert main(tiny_arguments(output, *SETTINGS)) == 0
    return output


@pytest.fixture
def output(whole, tmp_path) -> Path:
    """A copy of it, to be disturbed. The files that the configuration names stay where they were."""
    shutil.copytree(whole, tmp_path / "copy", symlinks=True)
    return tmp_path / "copy"


def again(whole, output, *overrides) -> list[str]:
    """The command of the whole run, for the copy."""
    return [*tiny_arguments(whole, *SETTINGS), f"training.output_dir={output}", *overrides]


def cut_back(output, step):
    """As if the run had been killed just after that step's checkpoint."""
    saves = get_run_dir(output) / "checkpoints"
    for path in list_checkpoints(saves):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    (saves / "best_model").unlink()


# ------------------------------------------------------------------------------------------------------------- resuming
def test_a_finished_run_reports_it_and_changes_nothing(whole, capsys):
    def files():
        return {path: path.stat().st_mtime_ns for path in get_run_dir(whole).rglob("*") if path.name != "run.lock"}

    before = files()
    assert main(tiny_arguments(whole, *SETTINGS)) == 0
    assert f"is finished: step {STEPS} of {STEPS}" in capsys.readouterr().err
    assert files() == before


def test_the_same_command_resumes_bitwise(whole, output, capsys):
    cut_back(output, 2)
    assert main(again(whole, output)) == 0
    assert "resuming after step 2" in capsys.readouterr().err
    same_end(get_run_dir(whole), get_run_dir(output), STEPS)
    rows = read_rows(get_run_dir(output) / "metrics.jsonl")
    assert [(row["step"], row["attempt"]) for row in rows if row["attempt"] == 2] == [(3, 2), (4, 2), (4, 2)]
    assert (get_run_dir(output) / "run_id").read_text() == (get_run_dir(whole) / "run_id").read_text()


@pytest.mark.slow
def test_an_adaptive_coefficient_and_several_passes_resume_too(tmp_path):
    more = [
        "optimization.disable_divergence=false",
        "optimization.divergence_type=adaptive",
        "optimization.divergence_target=0.0001",
        "optimization.divergence_horizon=20",
        "optimization.divergence_penalty=low_var_kl",
        "worker.actor.ppo_epochs=2",
        "worker.actor.optim.lr_scheduler_type=cosine",
        "training.val_freq=-1",
    ]
    for name in ("whole", "parts"):
        assert main(tiny_arguments(tmp_path / name, *SETTINGS, *more)) == 0
    cut_back(tmp_path / "parts", 2)
    assert main(tiny_arguments(tmp_path / "parts", *SETTINGS, *more)) == 0
    same_end(get_run_dir(tmp_path / "whole"), get_run_dir(tmp_path / "parts"), STEPS)
    coefficients = {
        row["actor/kl_coef"] for row in read_metrics(get_run_dir(tmp_path / "parts")).values() if len(row) > 20
    }
    assert len(coefficients) == STEPS, "it moved at every step"


def test_a_rule_that_changes_over_the_run_resumes_bitwise(tmp_path):
    """Its weights are those of the step's number: in the first step it has none."""
    plain = ["optimization.enable_perception_filtering=false", "optimization.enable_trajectory_reweighting=false"]
    more = [*plain, "optimization.credit=[pepo]", "training.val_freq=-1"]
    arguments = tiny_arguments(tmp_path / "whole", *SETTINGS, *more)
    assert main(arguments) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "parts", symlinks=True)
    cut_back(tmp_path / "parts", 2)
    assert main([*arguments, f"training.output_dir={tmp_path / 'parts'}"]) == 0
    same_end(get_run_dir(tmp_path / "whole"), get_run_dir(tmp_path / "parts"), STEPS)


@pytest.mark.slow
def test_responses_that_were_sampled_ahead_are_learnt_from_after_a_resume(tmp_path):
    """Those of the third step are of weights that the checkpoint after the second does not hold."""
    more = ["worker.rollout.off_policy_steps=1", "training.val_freq=-1", "worker.actor.optim.lr=1e-3"]
    for name in ("whole", "parts"):
        assert main(tiny_arguments(tmp_path / name, *SETTINGS, *more)) == 0
    cut_back(tmp_path / "parts", 2)
    assert main(tiny_arguments(tmp_path / "parts", *SETTINGS, *more)) == 0
    same_end(get_run_dir(tmp_path / "whole"), get_run_dir(tmp_path / "parts"), STEPS)
    rows = {place[0]: row for place, row in read_metrics(get_run_dir(tmp_path / "whole")).items() if not place[1]}
    assert [rows[step]["rollout/staleness_max"] for step in range(1, STEPS + 1)] == [0.0, 1.0, 1.0, 1.0]
    assert rows[1]["rollout/logprob_gap_max"] < 1e-4 < rows[3]["rollout/logprob_gap_max"]


def mixed_rows(folder: Path) -> Path:
    """Questions about pictures, and questions without any, in turn."""
    lines = []
    for index in range(8):
        question, seen = make_question("train", index), index % 2 == 1
        question.image.save(folder / f"{index}.png")
        result = {"prompt": question.prompt, "answer": question.answer, "options": question.options}
        lines.append(json.dumps(result | ({"images": [f"{index}.png"]} if seen else {})))
    (folder / "mixed.jsonl").write_text("\n".join(lines))
    return folder / "mixed.jsonl"


def test_a_critic_resumes_bitwise(tmp_path):
    """Each batch has pictures and text-only rows; in the first step only the critic learns, with its own schedule."""
    more = [
        f"dataset.train_files={mixed_rows(tmp_path)}", "dataset.shuffle=false", "training.max_steps=3",
        "training.save_freq=1", "training.val_freq=-1", "training.val_before_train=false",
        "optimization.advantage_estimator=gae", "worker.critic.warmup_steps=1", "worker.critic.optim.lr=1e-3",
        "worker.critic.optim.lr_scheduler_type=cosine",
    ]  # fmt: skip
    arguments = tiny_arguments(tmp_path / "whole", *SETTINGS, *more)
    assert main(arguments) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "parts", symlinks=True)
    cut_back(tmp_path / "parts", 1)
    assert main([*arguments, f"training.output_dir={tmp_path / 'parts'}"]) == 0
    whole, parts = get_run_dir(tmp_path / "whole"), get_run_dir(tmp_path / "parts")
    same_end(whole, parts, 3)
    first, last = (read_tensors(whole / "checkpoints" / f"step_{step}") for step in (1, 3))
    critics = {name for name in first if name.startswith("critic/model.safetensors")}
    assert "critic/model.safetensors: score.weight" in critics
    assert all(
        not torch.equal(first[name], last[name]) for name in critics if "score" in name or "visual.blocks" in name
    )
    rows = [row for _, row in sorted(read_metrics(parts).items()) if "critic/value_loss" in row]
    assert ["actor/pg_loss" in row for row in rows] == [False, True, True]
    counted = {(run / "checkpoints/step_3/critic/trainer/optimizer.json").read_text() for run in (whole, parts)}
    assert len(counted) == 1 and json.loads(counted.pop())["optimizer_step"] == 3 * 2, "it learns in each step, twice"


def test_another_configuration_is_an_error_that_names_the_keys(whole, output, capsys):
    assert main(again(whole, output, "worker.actor.optim.lr=1e-3", "training.max_steps=9")) == 2
    said = capsys.readouterr().err
    assert "worker.actor.optim.lr: was 0.0001, is 0.001" in said and "training.experiment_name" in said
    assert "max_steps" not in said.partition("lr:")[2]


def test_a_longer_run_resumes_from_the_end(whole, output):
    assert main(again(whole, output, "training.max_steps=5", "training.val_freq=-1")) == 0
    assert read_state(get_run_dir(output) / "checkpoints" / "step_5")["step"] == 5


def test_fresh_rejects_a_used_directory(whole, output, capsys):
    assert main(again(whole, output, "training.fresh=true")) == 2
    assert "training.fresh" in capsys.readouterr().err


def test_a_new_run_starts_from_another_ones_best(whole, tmp_path, capsys):
    best = get_run_dir(whole) / "checkpoints" / "best_model"
    words_of_new = tiny_arguments(
        whole, *SETTINGS, f"training.output_dir={tmp_path}", f"training.load_checkpoint_path={best}"
    )
    step = read_state(best)["step"]
    status = main([*words_of_new, f"training.max_steps={step + 1}", "dataset.shuffle=false"])
    said = capsys.readouterr().err
    assert status == 0 and f"starting after step {step}" in said
    rows = read_rows(get_run_dir(tmp_path) / "metrics.jsonl")
    assert [row["step"] for row in rows] == [step, step + 1, step + 1], "it is validated before its own first step"
    saved = get_run_dir(tmp_path) / "checkpoints" / f"step_{step + 1}"
    counters = json.loads((saved / "trainer" / "optimizer.json").read_text())
    assert counters["optimizer_step"] == 2 * (step + 1)


def test_validation_alone_uses_the_newest_checkpoint(whole, output):
    before = read_metrics(get_run_dir(output))
    assert main(again(whole, output, "training.val_only=true")) == 0
    last = read_rows(get_run_dir(output) / "metrics.jsonl")[-1]
    assert last["step"] == STEPS and last["val/reward_score"] == before[STEPS, True]["val/reward_score"]


def test_a_finished_run_from_python(whole):
    overrides = dict(word.split("=", 1) for word in tiny_arguments(whole, *SETTINGS)[1:])
    values = {key: yaml.safe_load(value) for key, value in overrides.items()}
    lr = {"worker.actor.optim.lr": float(overrides["worker.actor.optim.lr"])}  # 1e-4 is a text in YAML
    assert mtrl.Trainer(**values | lr).train() == get_run_dir(whole)


# --------------------------------------------------------------------------------------------------------------- damage
FILES = (
    "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "mtrl_manifest.json",
    "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json", "trainer/optimizer.json",
    "trainer/optimizer.safetensors", "trainer_state.json",
)  # fmt: skip


def test_these_are_all_files_of_a_checkpoint(whole):
    for path in list_checkpoints(get_run_dir(whole) / "checkpoints"):
        assert {str(each.relative_to(path)) for each in path.rglob("*") if each.is_file()} == set(FILES)
        check_manifest(path)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("harm", [flip, truncate, Path.unlink])
def test_harm_to_any_file_is_never_loaded(whole, output, harm, caplog):
    """A checkpoint file is checked completely before it is loaded, so this needs no run."""
    run = get_run_dir(output)
    newest = run / "checkpoints" / f"step_{STEPS}"
    for name in FILES:
        caplog.clear()
        harm(newest / name)
        start_again = find_start(run, steps=STEPS)
        assert start_again.step == 2 and f"step_{STEPS} is damaged ({name}" in caplog.text
        shutil.rmtree(run / "checkpoints" / f"step_{STEPS}.damaged")
        shutil.copytree(get_run_dir(whole) / "checkpoints" / f"step_{STEPS}", newest)


def test_a_run_with_a_damaged_checkpoint_resumes_from_the_one_before(whole, output, caplog):
    flip(get_run_dir(output) / "checkpoints" / f"step_{STEPS}" / "model.safetensors")
    assert main(again(whole, output)) == 0
    assert "is damaged (model.safetensors has changed since it was written)" in caplog.text
    same_end(get_run_dir(whole), get_run_dir(output), STEPS)
    assert (get_run_dir(output) / "checkpoints" / f"step_{STEPS}.damaged").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_model_is_not_evaluated(output, name, capsys):
    checkpoint = get_run_dir(output) / "checkpoints" / f"step_{STEPS}"
    flip(checkpoint / name)
    assert main(["eval", str(checkpoint)]) == 2
    message = capsys.readouterr().err
    assert name in message and "damaged" in message


def test_eval_takes_the_best_model_and_needs_no_optimizer(output, capsys):
    best = get_run_dir(output) / "checkpoints" / "best_model"
    (best / "trainer" / "optimizer.safetensors").unlink()
    assert main(["eval", str(best)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["val/reward_score"] == read_state(best)["score"]


# --------------------------------------------------------------------------------------------------------------- clock
def test_a_clock_that_goes_back_changes_no_number(whole, output, monkeypatch):
    """The clock goes back an hour at each call, so that every row and file seems older than the previous one."""
    cut_back(output, 2)
    now = iter(range(2_000_000_000, 0, -3600))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    assert main(again(whole, output)) == 0
    same_end(get_run_dir(whole), get_run_dir(output), STEPS)
    assert main(again(whole, output)) == 0
