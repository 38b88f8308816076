"""The console, to the letter."""

import io
import logging
import os

import pytest
import torch
from helpers import fake_experience, fake_rollouts, padded

from mtrl.report.markdown_text import shorten
from mtrl.tracking import console, pace
from mtrl.tracking.colour import Paint, wants_colour
from mtrl.tracking.console import Console, ConsoleSettings
from mtrl.tracking.preview import select_most_trained, training_preview, validation_preview
from mtrl.types import Credit, Rewards, ValidationSample
from mtrl.utils.terminal import SanitizedStream, sanitize


class Terminal(io.StringIO):
    def isatty(self):
        return True


class FakeTime:
    """A clock that the test advances. It has no wall clock; reading one fails."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def time(monkeypatch):
    fake = FakeTime()
    monkeypatch.setattr(console, "time", fake)
    monkeypatch.setattr(pace, "time", fake)
    return fake


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")


VALUES = {
    "reward/overall": 0.5,
    "reward/success_rate": 0.25,
    "response_length/mean": 12.04,
    "perf/tokens_per_second": 99.6,
    "perf/seconds_step": 10.0,
    "actor/grad_norm": 1.0,
}
QUIET = ConsoleSettings(colorize_output=False, log_preview_chars=0)


def etas(text):
    return [line.split("  ")[1].removeprefix("ETA ") for line in text.splitlines() if line.startswith("step")]


# ------------------------------------------------------------------------------------------------------------ progress
def test_plain_lines_off_a_terminal(time):
    stream = io.StringIO()
    shown = Console(4, QUIET, stream=stream)
    time.now = 130.0  # 20 s of start and validation, then a step of 10 s
    shown.metrics(1, VALUES)
    time.now = 150.0  # a step of 10 s and 10 s of other work: 15 s per step, two steps left
    shown.metrics(2, VALUES)
    time.now = 160.0
    shown.metrics(4, VALUES)
    numbers = "reward 0.500  accuracy 0.25  length 12.0  tok/s 100"
    assert stream.getvalue().splitlines() == [
        f"step 1/4  ETA 0:30  {numbers}",
        f"step 2/4  ETA 0:30  {numbers}",
        f"step 4/4  ETA 0:00  {numbers}",
    ]


def test_hours_and_missing_numbers(time):
    stream = io.StringIO()
    Console(1000, QUIET, stream=stream).metrics(1, {"perf/seconds_step": 10.0, "reward/overall": 1.0})
    assert stream.getvalue() == "step 1/1000  ETA 2:46:30  reward 1.000\n"  # 999 steps of 10 s


def test_the_time_left_counts_the_validations_to_come(time):
    """Six steps of 10 s, a validation of 30 s after steps 2, 4 and 6."""
    stream = io.StringIO()
    shown = Console(6, ConsoleSettings(val_freq=2, log_preview_chars=0), stream=stream)
    validated = {"val/reward_score": 0.0, "perf/seconds_validation": 30.0}
    time.now += 35
    shown.validation(0, validated, {})
    for step in range(1, 7):
        time.now += 10
        shown.metrics(step, {"perf/seconds_step": 10.0})
        if step % 2 == 0:
            time.now += 30
            shown.validation(step, validated, {})
    # 50 + 90, 40 + 90, 30 + 60, 20 + 60, 10 + 30, 0 + 30
    assert etas(stream.getvalue()) == ["2:20", "2:10", "1:30", "1:20", "0:40", "0:30"]


def test_the_time_left_follows_the_last_steps(time):
    """Responses grow: after twenty slow steps the quick ones of the beginning are forgotten."""
    stream = io.StringIO()
    shown = Console(100, QUIET, stream=stream)
    for step in range(1, 51):
        time.now += 1 if step <= 30 else 10
        shown.metrics(step, {"perf/seconds_step": 1.0})
    assert etas(stream.getvalue())[29] == "1:10" and etas(stream.getvalue())[49] == "8:20"


def test_the_time_left_of_a_resumed_run(time):
    """Steps of earlier attempts do not count for the speed of this one."""
    stream = io.StringIO()
    shown = Console(100, QUIET, stream=stream)
    time.now += 500
    shown.metrics(91, {"perf/seconds_step": 5.0})
    time.now += 5
    shown.metrics(92, {"perf/seconds_step": 5.0})
    assert etas(stream.getvalue()) == ["0:45", "0:40"]


def test_a_terminal_has_one_line_that_moves(time):
    stream = Terminal()
    shown = Console(4, QUIET, stream=stream)
    for step in range(1, 5):
        time.now += 10
        shown.metrics(step, VALUES if step == 1 else {"perf/seconds_step": 10.0})
    text = stream.getvalue()
    assert text.count("\r") == 4 and "\n" not in text
    first, second, *_ = text.split("\r")[1:]
    assert first.startswith("step 1/4 [======                  ]  ETA 0:30  reward")
    assert second.startswith("step 2/4 [============            ]  ETA 0:20") and len(second) == len(first)
    assert "[========================]" in text


def test_a_narrow_terminal_never_wraps(time, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    Console(4, QUIET, stream=stream).metrics(1, VALUES)
    assert len(stream.getvalue().lstrip("\r")) == 29


def test_a_warning_gets_a_separate_line(time):
    stream = Terminal()
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    try:
        shown = Console(4, QUIET, stream=stream)
        shown.metrics(1, VALUES)
        logging.getLogger("mtrl.anything").warning("look out")
        shown.metrics(2, VALUES)
        shown.close()
        assert handler.filters == [], "the log filter is removed"
    finally:
        logging.getLogger().removeHandler(handler)
    lines = stream.getvalue().split("\n")
    assert lines[0].startswith("\rstep 1/4") and lines[1] == "look out" and lines[2].startswith("\rstep 2/4")


# --------------------------------------------------------------------------------------------------------------- table
def shown_table(*validations, earlier=None, stream=None):
    stream = stream or io.StringIO()
    shown = Console(4, QUIET, earlier=earlier, stream=stream)
    for step, values, by in validations:
        shown.validation(step, values, by)
    return stream.getvalue().splitlines()


def test_a_validation_against_the_one_before_and_the_best(time):
    lines = shown_table(
        (
            0,
            {"val/reward_score": 1.0, "val/truncated": 0.5, "val/avg@4": 0.25, "val/pass@4": 0.5},
            {"kind": {"a": 0.5}},
        ),
        (
            2,
            {"val/reward_score": 2.0, "val/truncated": 0.0, "val/avg@4": 0.5, "val/pass@4": 0.5},
            {"kind": {"a": 0.75}},
        ),
        (4, {"val/reward_score": 1.5, "val/truncated": 0.0, "val/avg@4": 0.625}, {"kind": {"a": 0.25, "b": 1.0}}),
    )
    assert lines == [
        "validation at step 0            now",
        "  reward_score                1.000",
        "  avg@4                       0.250",
        "  pass@4                      0.500",
        "  truncated                   0.500",
        "  by kind",
        "    a                         0.500",
        "validation at step 2            now   change   best",
        "  reward_score                2.000   +1.000   now",
        "  avg@4                       0.500   +0.250   now",
        "  pass@4                      0.500   +0.000   0.500 at step 0",
        "  truncated                   0.000   -0.500",
        "  by kind",
        "    a                         0.750   +0.250   now",
        "validation at step 4            now   change   best",
        "  reward_score                1.500   -0.500   2.000 at step 2",
        "  avg@4                       0.625   +0.125   now",
        "  truncated                   0.000   +0.000",
        "  by kind",
        "    a                         0.250   -0.500   0.750 at step 2",
        "    b                         1.000",
    ]


def test_attention_has_no_best_and_is_aligned(time):
    """A higher VGR is more text and less image: neither a record nor green. Layer segments are only in the files."""
    values = {"val/attention/prompt_aei_vision_all": 1.0, "val/attention/vgr_late": 9.0, "val/avg@1": 0.5}
    lines = shown_table((0, values, {}), (2, {**values, "val/attention/prompt_aei_vision_all": 2.0}, {}))
    assert lines == [
        "validation at step 0                   now",
        "  avg@1                              0.500",
        "  attention/prompt_aei_vision_all    1.000",
        "validation at step 2                   now   change   best",
        "  avg@1                              0.500   +0.000   0.500 at step 0",
        "  attention/prompt_aei_vision_all    2.000   +1.000",
    ]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full is needed")
def test_a_full_disk_behind_the_console_ends_no_run(time):
    with open("/dev/full", "wb", buffering=0) as full:
        stream = io.TextIOWrapper(full, write_through=True)
        shown = Console(2, QUIET, stream=stream)
        shown.metrics(1, VALUES)
        shown.validation(1, {"val/reward_score": 1.0}, {})
        shown.close()
        with pytest.raises(OSError, match="space"):
            stream.write("the disk is really full")


def test_a_resumed_run_remembers_validations_that_were_not_undone(time):
    """The first attempt validated at 0, 10 and 20 and was taken up again from step 15."""
    earlier = {0: {"val/reward_score": 1.0}, 10: {"val/reward_score": 3.0}, 20: {"val/reward_score": 9.0}}
    lines = shown_table((20, {"val/reward_score": 2.0}, {}), earlier=earlier)
    assert lines[1] == "  reward_score                2.000   -1.000   3.000 at step 10"


def test_colours_only_where_they_are_wanted(time, monkeypatch):
    stream = Terminal()
    assert wants_colour(stream) and not wants_colour(stream, enabled=False) and not wants_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_colour(stream)
    monkeypatch.setenv("NO_COLOR", "")
    assert wants_colour(stream)
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_colour(stream)


def test_a_rise_is_green_and_a_fall_red(time):
    stream = Terminal()
    shown = Console(4, ConsoleSettings(log_preview_chars=0), stream=stream)
    for step, score in enumerate((1.0, 2.0, 1.5)):
        shown.validation(step, {"val/reward_score": score}, {})
    assert "\x1b[32m  +1.000\x1b[0m" in stream.getvalue() and "\x1b[31m  -0.500\x1b[0m" in stream.getvalue()


# ------------------------------------------------------------------------------------------------------------- preview
def test_responses_cannot_move_the_cursor():
    assert sanitize("a\x1b[2Jb\r\tc\n选\x9b") == "a\\x1b[2Jb\\r\\tc\n选\\x9b"


def test_long_texts_keep_both_ends():
    assert shorten("abcdef", 6) == "abcdef" and shorten("abcdefghij", 5) == "abc [.. 5 characters ..] ij"
    assert shorten("abc", 1) == "a [.. 2 characters ..] "


def test_a_sample_by_roles():
    sample = ValidationSample("t:1", "<image>Which?\nA or B", "<think>x</think>\x1b[0mB", "B", 1.2, {"accuracy": 1.0})
    assert validation_preview(sample, 100, Paint(False)) == [
        "  t:1",
        "    <image>Which?",
        "    A or B",
        "    <think>x</think>\\x1b[0mB",
        "    reward 1.200, truth B",
    ]
    coloured = validation_preview(sample, 100, Paint(True))
    assert coloured[1] == "\x1b[2m    <image>Which?\x1b[0m" and coloured[-1].startswith("    \x1b[32m")


@pytest.mark.parametrize(
    ("rewards", "colour"),
    [
        ({"accuracy": 0.0, "format": 1.0}, "31"),  # paid for its form, and wrong
        ({"math": 0.5}, "31"),
        ({"accuracy": 1.0, "length": -2.0}, "32"),  # correct, with a negative reward
        ({"accuracy": float("nan"), "math": 1.0}, "32"),
        ({"style": 3.0}, "1"),  # without accuracy
        (None, "1"),
    ],
)
def test_a_wrong_answer_is_never_green(rewards, colour):
    sample = ValidationSample("t", "", "", None, 0.7, rewards)
    assert validation_preview(sample, 9, Paint(True))[-1] == f"    \x1b[{colour}mreward 0.700\x1b[0m"


def test_a_wrong_training_response_that_is_praised_is_not_green():
    rollouts, one = fake_rollouts([2]), torch.ones(1, 2)
    parts = {"accuracy": torch.tensor([0.0]), "format": torch.tensor([1.0])}
    rewards = Rewards(torch.tensor([0.1]), parts, torch.zeros(1, dtype=torch.bool))
    chosen = select_most_trained(
        fake_experience(rollouts, rewards=rewards, credit=Credit(one, one > 0, one, one[0, :1]))
    )
    lines = training_preview(chosen, decode, 100, Paint(True))
    assert lines[-1].startswith("    \x1b[31m") and not any("\x1b[32m" in line or ";42m" in line for line in lines)


def taught(advantages, select=None):
    rollouts = fake_rollouts([len(row) for row in advantages], group=[0] * len(advantages))
    advantage = padded(advantages)
    chosen = rollouts.mask if select is None else padded(select).bool()
    credit = Credit(advantage, chosen, rollouts.mask.float(), torch.ones(len(advantages)))
    rewards = Rewards(torch.arange(len(advantages)).float(), {}, torch.zeros(len(advantages), dtype=torch.bool))
    return select_most_trained(fake_experience(rollouts, rewards=rewards, credit=credit))


def decode(ids):
    return [f" {i}" if i % 2 else f"\n{i}" for i in ids]


def test_the_response_that_teaches_most():
    chosen = taught([[1.0, 1.0], [-2.0, -2.0, -2.0], [9.0, 9.0]], select=[[1, 1], [0, 1, 1], [0, 0]])
    assert (chosen.id, chosen.tokens.tolist(), chosen.reward) == ("p0", [100, 101, 102], 1.0)
    assert chosen.credit.tolist() == [0.0, -2.0, -2.0]
    assert chosen.tokens.untyped_storage().nbytes() == 3 * 8, "a view would hold the whole step"
    assert taught([[0.0, 0.0]]) is None and taught([[1.0, 1.0]], select=[[0, 0]]) is None
    assert select_most_trained(fake_experience(fake_rollouts([1]))) is None, "there is no credit"


def test_the_count_of_trained_tokens_is_that_of_the_gradient():
    """Kept tokens without an advantage or a weight, and responses that get no gradient at all, are not counted."""
    rollouts = fake_rollouts([4, 4])
    advantage = torch.tensor([[1.0, 1, 1, 0], [9, 9, 9, 9]])
    weight = torch.tensor([[1.0, 1, 0, 1], [1, 1, 1, 1]])
    keep = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    credit = Credit(advantage, keep, weight, torch.ones(2), silenced=torch.tensor([False, True]))
    assert credit.trained.tolist() == [[False, True, False, False], [False] * 4]
    chosen = select_most_trained(fake_experience(rollouts, credit=credit))
    assert training_preview(chosen, decode, 100, Paint(False))[-1].endswith("1 of 4 tokens trained")


def test_tokens_that_learn_are_marked():
    chosen = taught([[-2.0, -2.0, -2.0]], select=[[0, 1, 1]])
    plain = training_preview(chosen, decode, 100, Paint(False))
    assert plain == ["  p0", "    fake", "    ", "    0[- 1][-", "    2]", "    reward 0.000, 2 of 3 tokens trained"]
    coloured = training_preview(chosen, decode, 100, Paint(True))
    assert "\x1b[30;43m 1\x1b[0m" in coloured[3] and coloured[4] == "    \x1b[30;43m2\x1b[0m"
    assert "[..]" in "".join(training_preview(chosen, decode, 4, Paint(False)))


def test_previews_come_with_a_validation(time):
    sample = ValidationSample("t:1", "Which?", "x" * 50, "B", 0.5)
    stream = io.StringIO()
    shown = Console(4, ConsoleSettings(log_preview_chars=10), decode=decode, stream=stream)
    one = torch.ones(1, 1)
    shown.rollouts(1, fake_experience(fake_rollouts([1]), credit=Credit(one, one > 0, one, one[0])))
    shown.validation(1, {"val/reward_score": 0.5}, {}, [sample])
    text = stream.getvalue()
    assert "    xxxxx [.. 40 characters ..] xxxxx" in text and "its trained tokens" in text and "\x1b" not in text
    before = len(text)
    shown.validation(2, {"val/reward_score": 0.5}, {}, [])
    assert "responses" not in stream.getvalue()[before:]
    Console(4, QUIET, stream=(silent := io.StringIO())).validation(1, {"val/reward_score": 0.5}, {}, [sample])
    assert "responses" not in silent.getvalue()


def test_text_of_the_data_cannot_move_the_cursor(time, tmp_path):
    """Names of columns, their values, parts of rewards, ids, texts and the folder; the colours are our own."""
    evil, stream, log = "x\x1b[2J\x07\r\u202e", Terminal(), io.StringIO()
    shown = Console(4, ConsoleSettings(directory=tmp_path / evil), decode=decode, stream=stream, log=log)
    shown.metrics(1, VALUES)
    sample = ValidationSample(evil, evil, evil, evil, 0.5, {"accuracy": 1.0})
    shown.validation(1, {"val/avg@1": 1.0, f"val/reward/{evil}": 1.0}, {evil: {evil + "\n": 1.0}}, [sample])
    shown.close()
    assert "\x1b" not in log.getvalue() and "x\\x1b[2J" in log.getvalue()
    for text in (stream.getvalue().replace("\r", "", 1), log.getvalue()):  # the line of progress moves
        assert sanitize(console.COLOUR_CODES.sub("", text)) == console.COLOUR_CODES.sub("", text)


def test_the_log_of_a_terminal_has_plain_lines(time):
    stream, log = SanitizedStream(Terminal()), io.StringIO()
    shown = Console(4, ConsoleSettings(log_preview_chars=0), stream=stream, log=log)
    for step in (1, 2):
        shown.metrics(step, VALUES)
    shown.validation(2, {"val/reward_score": 1.0}, {})
    assert stream.wrapped.getvalue().startswith("\rstep 1/4 [======") and "\x1b[1m" in stream.wrapped.getvalue()
    lines = log.getvalue().splitlines()
    assert lines[0].startswith("step 1/4  ETA 0:30  reward") and lines[1].startswith("step 2/4  ETA")
    assert lines[2].startswith("validation at step 2") and "\x1b" not in log.getvalue()


# ------------------------------------------------------------------------------------------------------------- summary
def test_the_summary(time, tmp_path):
    stream = io.StringIO()
    shown = Console(12, ConsoleSettings(log_preview_chars=0, directory=tmp_path), stream=stream)
    for step, score in ((10, 0.5), (11, 0.75), (12, 0.625)):  # a run that went on at step 9
        time.now += 40
        shown.metrics(step, VALUES)
        shown.validation(step, {"val/avg@1": score, "val/reward_score": 9.0}, {})
    shown.close()
    assert stream.getvalue().splitlines()[-4:] == [
        "finished at step 12 of 12: 3 steps in 2:00, 100 tokens/s",
        "  val/avg@1: 0.500 at step 10, 0.625 at step 12; best 0.750 at step 11",
        f"  files: {tmp_path}",
        f"  next:  mtrl eval {tmp_path} [--data FILE]",
    ]


def test_a_stopped_run_reports_its_step(time):
    stream = io.StringIO()
    shown = Console(12, QUIET, stream=stream)
    shown.metrics(7, VALUES)
    shown.close()
    assert stream.getvalue().splitlines()[-1] == "stopped at step 7 of 12: 1 step in 0:00, 100 tokens/s"


def test_without_a_step_there_is_no_summary():
    stream = io.StringIO()
    Console(12, QUIET, stream=stream).close()
    assert stream.getvalue() == ""
