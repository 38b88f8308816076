"""The commands as a user types them, on the embedded model."""

import json
import multiprocessing
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
from run_helpers import load_in_one_thread
from transformers import AutoModelForImageTextToText

import mtrl
from mtrl.cli import main
from mtrl.config import ConfigError, load_config
from mtrl.embedded.embedded_rows import MODEL_DIRECTORY, ZooRows
from mtrl.report.run_curves import draw_runs
from mtrl.tracking import curve
from mtrl.tracking.jsonl import read_rows

SMALL = [
    "dataset.rollout_batch_size=4",
    "worker.actor.global_batch_size=4",
    "worker.rollout.n=4",
    "dataset.val_batch_size=100",
]
LOGGED = """
    actor/approx_kl actor/clipfrac actor/clipfrac_low actor/clipfrac_high actor/entropy actor/grad_norm actor/lr
    actor/perception_token_fraction actor/combined_token_fraction actor/low_var_kl_mean_selected
    actor/low_var_kl_mean_rejected actor/low_var_kl_threshold actor/sensitivity_score_mean actor/sensitivity_score_min
    actor/sensitivity_score_max actor/scaling_factor_mean actor/scaling_factor_max actor/scaling_capped
    perf/tokens_per_second perf/samples_per_second perf/throughput perf/seconds_generate perf/peak_gb_update
    reward/overall reward/accuracy reward/format reward/zero_std_groups reward/success_rate
    response_length/mean response_length/truncated rollout/logprob_gap_mean
""".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> str:
    """Ten of the embedded validation set: two of each kind of question."""
    directory, zoo = tmp_path_factory.mktemp("questions"), ZooRows("validation")
    with (directory / "questions.jsonl").open("w") as file:
        for index in range(10):
            row = zoo.read(index)
            row["images"][0].save(directory / f"{index}.png")
            file.write(json.dumps(row | {"images": [f"{index}.png"]}) + "\n")
    return f"dataset.val_files={file.name}"


@pytest.fixture(scope="module")
def run(tmp_path_factory, questions) -> Path:
    """One short training run through the documented module entry, in a fork with its own streams."""
    output = tmp_path_factory.mktemp("outputs")
    arguments = [*SMALL, questions, f"training.output_dir={output}", "training.max_steps=2", "training.val_freq=1"]
    out, err = output / "stdout", output / "stderr"
    process = multiprocessing.get_context("fork").Process(target=run_module, args=(arguments, out, err))
    process.start()
    process.join()
    log, messages = out.read_text(), err.read_text()
    assert process.exitcode == 0, messages
    assert "zoo.yaml" in messages, "the use of the packaged config must be reported"
    assert "steps: 2, each 4 prompts x 4 responses of at most" in messages
    assert "step 2/2" in messages and "ETA" in messages
    for line in ("steps: 2, each 4 prompts", "step 2/2  ETA", "validation at step 2", "finished at step 2 of 2"):
        assert log.count(line) == 1, "stdout is a separate log here and has everything once"
    return output / "mtrl" / "zoo"


def run_module(arguments: list[str], out: Path, err: Path) -> None:
    """`python -m mtrl.training.training_main`, with its curve and its streams redirected to files."""
    curve.draw_runs = draw_runs  # other tests of this folder draw none
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    sys.argv[1:] = arguments
    load_in_one_thread()
    runpy.run_module("mtrl.training.training_main", run_name="__main__")


def test_a_run_leaves_its_files(run):
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows if "actor/pg_loss" in row] == [1, 2]
    assert [row["step"] for row in rows if "val/avg@1" in row] == [0, 1, 2]
    assert len(read_rows(run / "rollouts.jsonl")) == 2 * 4 * 4
    assert load_config(run / "config.yaml").training.max_steps == 2
    assert (run / "curve.png").stat().st_size > 10_000
    step = next(row for row in rows if row["step"] == 2)
    for name in LOGGED:
        assert isinstance(step[name], float), name


def test_the_checkpoint_loads_in_plain_transformers(run):
    checkpoint = run / "checkpoints" / "step_2"
    trained = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    before = AutoModelForImageTextToText.from_pretrained(MODEL_DIRECTORY, dtype=torch.float32)
    changed = [not torch.equal(a, b) for a, b in zip(trained.parameters(), before.parameters(), strict=True)]
    assert any(changed)


def test_eval_of_a_run_and_of_its_checkpoint_agree_with_the_log(run, capsys):
    summaries = []
    for path in (run, run / "checkpoints" / "step_2"):
        assert main(["eval", str(path), "optimization.compute_attention_metrics=true"]) == 0
        summaries.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    logged = [row for row in read_rows(run / "metrics.jsonl") if "val/avg@1" in row][-1]
    for summary in summaries:
        numbers = {name: value for name, value in summary.items() if name.startswith("val/")}
        assert "val/avg@1" in numbers and "val/attention/vgr_late" in numbers
        assert numbers == pytest.approx({name: logged[name] for name in numbers}, rel=1e-6, abs=1e-9)
        assert set(summary["by"]["kind"]) == {"colour", "shape", "position", "count", "comparison"}


def test_eval_stores_responses_and_reads_attention_only_on_request(run, tmp_path, capsys):
    (tmp_path / "two.jsonl").write_text(
        '{"prompt": "Which? A or B", "answer": "A"}\n{"prompt": "Why?", "answer": "B"}\n'
    )
    command = ["eval", str(run), "--data", str(tmp_path / "two.jsonl"), f"--out={tmp_path / 'out.jsonl'}"]
    assert main([*command, "worker.rollout.val.n=2", "worker.rollout.val.temperature=1"]) == 0
    captured = capsys.readouterr()
    assert "evaluating 2 prompts, 2 responses each" in captured.err and str(tmp_path / "out.jsonl") in captured.err
    summary, rows = json.loads(captured.out.splitlines()[-1]), read_rows(tmp_path / "out.jsonl")
    assert not [name for name in summary if "attention" in name]
    assert [(row["question"], row["answer"]) for row in rows] == [("Which? A or B", "A")] * 2 + [("Why?", "B")] * 2
    assert sum(row["reward"] for row in rows) / 4 == pytest.approx(summary["val/reward_score"])
    assert {"accuracy", "format"} <= rows[0]["rewards"].keys() and all(isinstance(row["response"], str) for row in rows)
    assert main(command) == 2, "it is not written over"
    assert "out.jsonl exists already" in capsys.readouterr().err


def test_starting_a_finished_run_again_reports_that_it_is_finished(run, questions, capsys):
    assert main(["train", *SMALL, questions, f"training.output_dir={run.parent.parent}", "training.max_steps=2"]) == 0
    assert "is finished: step 2 of 2" in capsys.readouterr().err


def test_val_only_validates_and_stops(tmp_path, questions):
    output = f"training.output_dir={tmp_path}"
    assert main(["train", *SMALL, questions, output, "training.val_only=true"]) == 0
    rows = read_rows(tmp_path / "mtrl" / "zoo" / "metrics.jsonl")
    assert len(rows) == 1 and "val/avg@1" in rows[0]


def test_data_shows_the_embedded_task(capsys):
    assert main(["data", "zoo@validation"]) == 0
    shown = capsys.readouterr().out
    assert "200" in shown and "<|image_pad|>" in shown and "kind" in shown


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["data"], "mtrl data FILE"),
        (["data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["eval"], "mtrl eval CHECKPOINT"),
        (["eval", "nowhere"], "nowhere"),
        (["train", "worker.reward.reward_fn_path=nowhere.py", "worker.reward.functions=null"], "nowhere.py"),
        (["train", "worker.actor.model.model_path=nowhere", "dataset.train_files=nowhere.jsonl"], "nowhere"),
        (["train", "worker.rollout.engine_kwargs={seed: 1}"], "not supported with"),
        (["demo", "optimization.perturbation=thunder"], "random_patch_blackening"),
    ],
)
def test_user_errors_are_reported_without_a_traceback(words, named, tmp_path, capsys):
    extra = [f"training.output_dir={tmp_path}"] if words[0] in ("train", "demo") else []
    weights = ["worker.reward.weights=null"] if "worker.reward.functions=null" in words else []
    assert main([*words, *extra, *weights]) == 2
    message = capsys.readouterr().err
    assert named in message and "Traceback (most recent call last)" not in message.split("cannot be loaded")[0]


def test_trainer_takes_python_rows_and_functions(tmp_path):
    seen = []

    def short(sample):
        seen.append(sample["colour"])
        return 1.0 if len(sample["response"]) < 60 else 0.0, {"characters": len(sample["response"])}

    rows = [{"prompt": f"Say {name}.", "answer": name, "colour": name} for name in ("red", "blue", "green", "pink")]
    trainer = mtrl.Trainer(
        data=rows,
        rewards=[short],
        max_steps=1,
        rollout_batch_size=2,
        global_batch_size=2,
        output_dir=str(tmp_path),
        **{"worker.rollout.n": 3},
    )
    directory = trainer.train()
    step = next(row for row in read_rows(directory / "metrics.jsonl") if "actor/pg_loss" in row)
    assert len(seen) == 6 and set(seen) <= {"red", "blue", "green", "pink"}
    assert "reward/short" in step and step["reward/characters"] > 0


def test_few_rows_are_reported_and_repeated(tmp_path, caplog):
    """Two rows for four prompts: each is sampled twice per step, and its second group is no copy of the first."""
    rows = [{"prompt": "Say red.", "answer": "red"}, {"prompt": "Say blue.", "answer": "blue"}]
    sizes = {"max_steps": 1, "rollout_batch_size": 4, "global_batch_size": 4, "worker.rollout.n": 3}
    directory = mtrl.Trainer(data=rows, rewards=["length"], output_dir=str(tmp_path), **sizes).train()
    assert "2 rows for dataset.rollout_batch_size=4: a step uses a row up to 2 times" in caplog.text
    said = [row["response"] for row in read_rows(directory / "rollouts.jsonl")]
    ids = [row["id"] for row in read_rows(directory / "rollouts.jsonl")]
    for each in set(ids):
        own = [text for text, name in zip(said, ids, strict=True) if name == each]
        assert len(own) == 6 and own[:3] != own[3:]


def test_trainer_gives_its_rewards_their_weights():
    def short(sample):
        return 1.0

    one = mtrl.Trainer(rewards=[short]).config.worker.reward
    assert one.functions == ("python:short",) and one.weights is None
    two = mtrl.Trainer(rewards=["accuracy", short], weights=[1.0, 0.5], early_weights=[0.0, 1.0]).config.worker.reward
    assert two.weights == (1.0, 0.5) and two.early_weights == (0.0, 1.0)
    with pytest.raises(ConfigError, match="weights"):
        mtrl.Trainer(rewards=[short], weights=[1.0, 2.0])
