"""The Markdown logs: numbers by hand, names of the spec, bounds, and no cost for the training thread."""

import json
import logging
import re
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import NAN, fake_experience, fake_prompt, fake_rollouts

from mtrl.compose.run import build
from mtrl.config import load_config
from mtrl.embedded.embedded_rows import CONFIG_FILE
from mtrl.report import markdown_text
from mtrl.tracking import background
from mtrl.tracking.background import Background, append_bounded
from mtrl.tracking.markdown import LogPaths, MarkdownLogs
from mtrl.types import SEGMENTS, Credit, Rewards, Signals, ValidationSample

BALANCED, LOOKING = [0.5, 0.5], [0.2, 0.8]  # mass on 2 text and 4 image tokens: VGR 2 and 0.5


def decode(ids):
    return [f"t{i}" for i in ids]


def make_step(weights=None, mass=True):
    """Three responses of 2, 1 and 2 tokens; the last to a prompt without an image."""
    rollouts = fake_rollouts([2, 1, 2], group=[0, 0, 1], visual=[True, False], truncated=[True, False, False])
    rewards = Rewards(
        torch.tensor([1.5, 0.5, 1.0]),
        {"accuracy": torch.tensor([1.0, 0.0, 1.0]), "vgr": torch.tensor([0.5, 0.5, NAN])},
        torch.tensor([False, False, True]),
    )
    ones = torch.ones(rollouts.mask.shape)
    credit = Credit(ones, rollouts.mask, ones, torch.ones(3), weights)
    tokens = torch.tensor([[BALANCED, LOOKING], [BALANCED, BALANCED], [BALANCED, BALANCED]])
    by_segment = tokens[:, :, None, :].expand(-1, -1, len(SEGMENTS), -1)
    signals = Signals(attention_mass=by_segment, prompt_attention_mass=by_segment[:, 1]) if mass else Signals()
    return fake_experience(rollouts, signals, rewards=rewards, credit=credit)


def log_into(tmp_path, *steps, validations=(), **options):
    logs = MarkdownLogs(LogPaths.make(tmp_path / "logs"), decode, **options)
    for number, step in enumerate(steps, 1):
        logs.rollouts(number, step)
        if number in validations:
            logs.validation(number, {}, {}, [])
    logs.close()
    return {path.name.split("_2")[0].removesuffix(".md"): path for path in sorted((tmp_path / "logs").glob("*.md"))}


# ---------------------------------------------------------------------------------------------------------------- pages
def test_a_step_in_numbers(tmp_path):
    text = log_into(tmp_path, make_step())["rollout_results"].read_text()
    assert "# Step 1" in text and "3 responses to 2 prompts, 1 cut at the length limit, 1 failed rewards." in text
    assert "| reward | 1 | 0.4082 | 0.5 | 1.5 |" in text
    assert "| vgr | 0.5 | 0 | 0.5 | 0.5 |" in text, "values that do not apply are left out"
    assert "| response length | 1.667 | 0.4714 | 1 | 2 |" in text
    assert "| success rate | 0.6667 |  |  |  |" in text, "two of three: `reward/success_rate` of the step"
    # row 0: mean mass [0.35, 0.65], VGR (0.35 / 2) / (0.65 / 4) = 1.0769; row 1: 2; row 2 has no image
    assert "| late | 1.538 | 0.4615 | 1.077 | 2 | 1.275 | 0.8625 |" in text
    assert "reward 1.5, accuracy 1, vgr 0.5; 2 tokens, length; VGR early 1.077, middle 1.077, late 1.077" in text
    assert "reward 1, accuracy 1, vgr n/a; 2 tokens, stop; VGR n/a (no image)" in text
    assert re.findall(r"### (.*)", text) == ["p0", "p1", "p0"], "from the lowest reward to the highest"
    assert text.index("row 1") < text.index("row 2") < text.index("row 0")


def test_a_step_whose_rewards_do_not_judge_correctness_has_no_success_rate(tmp_path):
    step = make_step()
    rewards = replace(step.rewards, parts={"vgr": step.rewards.parts["vgr"], "accuracy": torch.full((3,), NAN)})
    assert "success rate" not in log_into(tmp_path, replace(step, rewards=rewards))["rollout_results"].read_text()


def test_attention_diagnostics(tmp_path):
    text = log_into(tmp_path, make_step())["attention_diagnostics"].read_text()
    answering, reading = text.split("While reading")
    assert "| all | 1.538 | 0.4615 | 1.077 | 2 | 1.275 | 0.8625 |" in answering
    assert "| all | 1.25 | 0.75 | 0.5 | 2 |" in reading, "0.5 of row 0, 2 of row 1"
    assert "t0(2) t1(0.5)" in text and "t100(2)" in text and "t200" not in text


def test_token_weights(tmp_path):
    weights = torch.tensor([[0.4, 1.6], [1.0, 9.0], [1.0, 1.0]])  # 9 is off the mask
    text = log_into(tmp_path, make_step(weights))["token_weights"].read_text()
    assert "| mean | std | min | max |" in text and "| 1 | 0.3795 | 0.4 | 1.6 |" in text
    lists = [json.loads(found) for found in re.findall(r"```json\n(.*?)```", text, re.DOTALL)]
    assert lists[-1] == [{"token": "t0", "weight": 0.4, "vgr": 2.0}, {"token": "t1", "weight": 1.6, "vgr": 0.5}]
    assert "t0(0.4) t1(1.6)" in text


def test_unmeasured_signals_have_no_file(tmp_path):
    assert list(log_into(tmp_path, make_step(mass=False))) == ["rollout_results"]


def test_a_validation(tmp_path):
    logs = MarkdownLogs(LogPaths.make(tmp_path), decode)
    values = {"val/avg@4": 0.25, "val/attention/vgr_late": 1.5, "val/attention/aei_vision_late": 0.8}
    logs.validation(
        7,
        values,
        {"kind": {"colour": 0.5}},
        [ValidationSample("t:1", "Which?", "B it is", "B", 1.2, {"accuracy": 1.0, "format": 0.2})],
    )
    logs.close()
    (path,) = tmp_path.glob("eval_results_*.md")
    text = path.read_text()
    for line in ("# Validation at step 7", "| val/avg@4 | 0.25 |", "| late | 1.5 | n/a | 0.8 |", "| colour | 0.5 |"):
        assert line in text
    assert "Which?" in text and "B it is" in text and "reward 1.2, accuracy 1, format 0.2" in text


def test_a_response_cannot_break_out_of_its_fence(tmp_path):
    step = make_step(mass=False)
    evil = replace(step.rollouts, text=("```\n# Step 99\n````", "\x1b[31mred", "x" * 100_000))
    text = log_into(tmp_path, replace(step, rollouts=evil))["rollout_results"].read_text()
    assert "`````\n```\n# Step 99\n````\n`````" in text and "\x1b" not in text
    assert len(text) < 3 * markdown_text.TEXT_CHARS
    assert markdown_text.table(["a"], [["x|y\nz"]]).splitlines()[2] == r"| x\|y\nz |"


# --------------------------------------------------------------------------------------------------- where and how much
def test_paths_of_the_user(tmp_path):
    named = LogPaths.make(tmp_path / "logs", str(tmp_path / "a/r.md"), str(tmp_path / "b"))
    assert named.rollouts == tmp_path / "a/r.md" and named.evaluation.parent == tmp_path / "a"
    assert named.weights == tmp_path / "a/token_weights.md"
    assert named.attention.parent == tmp_path / "b" and named.attention.name.startswith("attention_diagnostics_2")
    assert re.fullmatch(r"rollout_results_\d{8}-\d{6}\.md", LogPaths.make(tmp_path).rollouts.name)


def test_only_validated_steps(tmp_path):
    steps = [make_step(mass=False)] * 3
    text = log_into(tmp_path, *steps, validations=(2,), every_step=False)["rollout_results"].read_text()
    assert re.findall("# Step .", text) == ["# Step 2"]


def test_steps_are_appended_and_files_stay_bounded(tmp_path):
    both = log_into(tmp_path, make_step(), make_step())["rollout_results"].read_text()
    assert both.index("# Step 1") < both.index("# Step 2")
    path = tmp_path / "log.md"
    for number in range(100):
        append_bounded(path, f"{number:010}", limit=50)
    assert path.read_text() == "".join(f"{number:010}" for number in range(95, 100))
    assert sum(each.stat().st_size for each in tmp_path.glob("log*.md")) <= 100
    assert (tmp_path / "log.1.md").read_text().endswith("0000000094")


# ------------------------------------------------------------------------------------------------ off the training path
def test_slow_writing_drops_entries_and_never_waits(caplog):
    gate, done = threading.Event(), []
    worker = Background("slow", waiting=2)
    worker.submit(gate.wait)
    for number in range(50):
        worker.submit(lambda number=number: done.append(number))
    gate.set()  # one that waited would have waited for ever
    worker.close()
    assert done == sorted(done) and len(done) + worker.dropped == 50 and worker.dropped >= 47
    assert f"{worker.dropped} entries were dropped" in caplog.text


def test_a_failure_is_reported_once_and_stops_nothing(caplog):
    done = []
    worker = Background("failing")
    for _ in range(2):
        worker.submit(lambda: 1 / 0)
    worker.submit(lambda: done.append(1))
    worker.close()
    assert done == [1]
    warned = [record for record in caplog.records if "division by zero" in record.message]
    assert len(warned) == 1 and warned[0].levelno == logging.WARNING


def test_a_permission_error_is_reported_without_a_traceback(tmp_path, caplog):
    (tmp_path / "file").touch()
    worker = Background("refused")
    worker.submit(lambda: append_bounded(tmp_path / "file" / "log.md", "text"))
    worker.close()
    (warned,) = caplog.records
    assert "an entry cannot be written" in warned.message and not warned.exc_info


def test_a_job_that_hangs_does_not_hold_the_end(caplog, monkeypatch):
    monkeypatch.setattr(background, "PATIENCE_S", 0.05)
    gate = threading.Event()
    worker = Background("hanging", waiting=1)
    worker.submit(gate.wait)
    worker.submit(gate.wait)
    worker.close()
    assert "are lost" in caplog.text
    gate.set()


def test_a_directory_that_cannot_be_written_stops_nothing(tmp_path, caplog):
    (tmp_path / "logs").write_text("a file where the folder should be")
    log_into(tmp_path, make_step())
    assert "the run continues" in caplog.text


def test_pixels_do_not_wait_for_the_log(tmp_path):
    step = make_step()
    pictures = tuple(replace(prompt, media=(np.zeros((8, 8, 3), np.uint8),)) for prompt in step.rollouts.prompts)
    logs = MarkdownLogs(LogPaths.make(tmp_path), decode, every_step=False)
    logs.rollouts(1, replace(step, rollouts=replace(step.rollouts, prompts=pictures)))
    number, kept = logs._last
    assert number == 1 and all(not prompt.media and not prompt.task.media for prompt in kept.rollouts.prompts)
    logs.close()


def test_a_large_step_is_written_off_the_training_path(tmp_path):
    """256 prompts, 2048 responses of 512 tokens. Nothing of it is decoded or written before the call returns."""
    rows, tokens = 2048, 512
    small = fake_rollouts([1])
    rollouts = replace(
        small,
        prompts=tuple(fake_prompt(f"p{i}") for i in range(256)),
        group=torch.arange(rows) // 8,
        tokens=torch.zeros(rows, tokens, dtype=torch.long),
        mask=torch.ones(rows, tokens, dtype=torch.bool),
        text=("text " * 100,) * rows,
        finish_reason=("stop",) * rows,
    )
    rewards = Rewards(torch.rand(rows), {"accuracy": torch.rand(rows)}, torch.zeros(rows, dtype=torch.bool))
    ones = torch.ones(rows, tokens)
    mass = torch.rand(rows, tokens, len(SEGMENTS), 2)
    credit = Credit(ones, rollouts.mask, ones, ones[:, 0], ones)
    experience = fake_experience(rollouts, Signals(attention_mass=mass), rewards=rewards, credit=credit)
    gate, decoded_by = threading.Event(), set()

    def gated_decode(*arguments):
        assert gate.wait(60)
        decoded_by.add(threading.current_thread())
        return decode(*arguments)

    logs = MarkdownLogs(LogPaths.make(tmp_path), gated_decode)
    logs.rollouts(1, experience)
    gate.set()
    logs.close()
    assert decoded_by and threading.current_thread() not in decoded_by
    assert {path.name.split("_2")[0] for path in tmp_path.glob("*.md")} == {
        "rollout_results", "attention_diagnostics", "token_weights.md"
    }  # fmt: skip


@pytest.mark.slow
def test_under_one_percent_of_a_real_step(tmp_path):
    settings = {"training.output_dir": str(tmp_path), "training.max_steps": 3, "training.logger": (),
                "training.val_before_train": False, "dataset.rollout_batch_size": 8,
                "worker.actor.global_batch_size": 8, "training.val_freq": -1}  # fmt: skip
    run = build(load_config(CONFIG_FILE, settings))
    trackers = run.loop.components.tracker.trackers
    (logs,) = [each for each in trackers if isinstance(each, MarkdownLogs)]
    spent, plain = [], logs.rollouts

    def timed(*arguments):
        begin = time.thread_time()
        plain(*arguments)
        spent.append(time.thread_time() - begin)

    logs.rollouts = timed
    begin = time.thread_time()
    run.train()
    assert len(spent) == 3 and sum(spent) < 0.01 * (time.thread_time() - begin)
    (path,) = (run.directory / "logs").glob("rollout_results_*.md")
    assert re.findall("# Step .", path.read_text()) == ["# Step 1", "# Step 2", "# Step 3"]
