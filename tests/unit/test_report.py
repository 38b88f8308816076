"""Charts: the layout of a picture, by matplotlib's own objects; and the curves of runs, from their rows."""

import json
import logging
import shutil
import subprocess
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
from helpers import slow_but
from matplotlib.text import Text
from PIL import Image

from mtrl import cli
from mtrl.report.chart import Curve, Panel, draw_chart, make_chart, running_mean, smoothing_window
from mtrl.report.run_curves import metric_panels, usual_metrics, usual_panels
from mtrl.report.style import COLOURS, MARKS, plain_numbers, ticks_within, to_drawable
from mtrl.tracking import curve
from mtrl.tracking.curve import CurveFile
from mtrl.utils.metric_history import history

ROOT = Path(__file__).resolve().parents[2]
RATE = [(0, 0.4), (4, 0.6), (8, 1.0)]
NOISE = [(step, 0.5 + 0.1 * (-1) ** step) for step in range(1, 25)]


def draw_axes(figure):
    figure.canvas.draw()
    return figure.axes


def labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


# ---------------------------------------------------------------------------------------------------------------- style
def test_ticks_are_round_and_within_the_axis():
    assert ticks_within(0, 24, count=7, integer=True) == [0, 5, 10, 15, 20]
    assert ticks_within(0, 1, count=6) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert ticks_within(3, 4, count=7, integer=True) == [3, 4], "a step is an integer"


def test_numbers_have_the_decimals_they_need():
    assert plain_numbers([0.0, 0.1 + 0.2, 1.0]) == ["0.0", "0.3", "1.0"]
    assert plain_numbers([-2.0, 0.0, 12500.0]) == ["−2", "0", "12,500"]
    assert plain_numbers([0.0, 2e-6]) == ["0", "2e-06"] and plain_numbers([]) == []


def test_text_is_drawn_literally():
    """A $ begins no formula, a control character is no command, and a sign without a glyph is no empty box."""
    figure = make_chart("a$b_1$\n\x1b", [Panel("p$", [Curve("l$", RATE), Curve("m", RATE)])])
    figure.canvas.draw()
    shown = {text.get_text(): text for text in figure.findobj(Text) if text.get_text()}
    for text in ("a$b_1$\\n\\x1b", "p$", "l$"):
        assert not shown[text].get_parse_math()
    assert to_drawable("\U000f0000é", 20) == "\\U000f0000é"
    assert len(to_drawable("x" * 500, 60)) < 100


# ---------------------------------------------------------------------------------------------------------------- chart
def test_each_validation_is_a_point_and_single_steps_are_smoothed():
    panel = Panel("accuracy", [Curve("training", NOISE, noisy=True), Curve("validation", RATE)], bounds=(0, 1))
    (axes,) = draw_axes(make_chart("run", [panel]))
    pale, mean, validated = axes.get_lines()
    assert list(zip(*validated.get_data(), strict=True)) == RATE and validated.get_marker() == MARKS[1]
    assert list(zip(*pale.get_data(), strict=True)) == NOISE and pale.get_alpha() < 0.5
    assert list(zip(*mean.get_data(), strict=True)) == running_mean(NOISE, 5) and mean.get_marker() == ""
    assert axes.get_ylim() == (0, 1) and axes.get_xlim() == (0, 24)
    assert labels(axes.xaxis) == ["0", "5", "10", "15", "20"]
    assert labels(axes.yaxis) == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]


def test_the_mean_spans_more_of_a_longer_run():
    assert smoothing_window([NOISE[:9]]) == 1, "too few to be smoothed"
    windows = [smoothing_window(runs) for runs in ([], [NOISE], [range(5000), NOISE], [range(10**6)])]
    assert windows == [1, 5, 100, 2000]
    assert running_mean([(1, 1.0), (2, 3.0), (3, 8.0)], 2) == [(1, 1.0), (2, 2.0), (3, 5.5)]


@pytest.mark.parametrize("count", slow_but([1, 2, 3, 5, 12], 1, 2, 5))
def test_nothing_overlaps(count):
    """Head, legend and panels do not overlap for any number of names."""
    names = [f"a-run-with-a-name-of-its-own-{i}" for i in range(count)]
    figure = make_chart(
        "title", [Panel(f"p{i}", [Curve(name, RATE) for name in names]) for i in range(count)], note="note"
    )
    axes, renderer = draw_axes(figure), figure.canvas.get_renderer()
    boxes = [each.get_tightbbox(renderer) for each in axes] + [text.get_window_extent() for text in figure.texts]
    boxes += [legend.get_window_extent() for legend in figure.legends]
    assert len(axes) == count and len(figure.legends) == (count > 1), "a single line needs no legend"
    for place, one in enumerate(boxes):
        assert figure.bbox.contains(one.x0, one.y0) and figure.bbox.contains(one.x1, one.y1)
        for other in boxes[place + 1 :]:
            assert not one.overlaps(other)


def test_each_name_has_one_unique_style_everywhere():
    names = [f"run {i}" for i in range(2 * len(COLOURS))]
    first, second = draw_axes(
        make_chart("t", [Panel("p", [Curve(n, RATE) for n in names]), Panel("q", [Curve("run 3", RATE)])])
    )
    looks = [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in first.get_lines()]
    assert len(set(looks)) == len(names) and len({line.get_color() for line in first.get_lines()}) == len(COLOURS)
    (line,) = second.get_lines()
    assert (line.get_color(), line.get_marker(), line.get_linestyle()) == looks[3]


def test_the_axis_begins_at_zero_where_that_is_near():
    near, far, below = (
        Panel("p", [Curve("a", [(0, low), (1, high)])]) for low, high in ((0.1, 0.3), (12, 13), (-1, 1))
    )
    spans = [axes.get_ylim() for axes in draw_axes(make_chart("t", [near, far, below]))]
    assert spans[0][0] == 0 and spans[1][0] > 11 and spans[2][0] < -1


@pytest.mark.parametrize("points", [[(3, 0.5)], [(0, 0.0), (1, 0.0)], [(0, 1e-12), (1, 1e99)], [(1, -1e99), (2, 1e99)]])
def test_odd_numbers_are_drawn(points, tmp_path):
    draw_chart(tmp_path / "a.png", "t", [Panel("p", [Curve("a", points, noisy=True)])])
    with Image.open(tmp_path / "a.png") as picture:
        assert len(picture.convert("RGB").getcolors(10**6)) > 20, "something is drawn"


def test_a_picture_is_whole_or_not_there(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_text("the one before")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        draw_chart(tmp_path / "a.png", "t", [Panel("p", [Curve("a", RATE)])])
    assert [path.read_text() for path in tmp_path.iterdir()] == ["the one before"]


@pytest.mark.slow  # 3 s
def test_no_state_is_shared_with_other_drawing(tmp_path):
    """pyplot keeps figures and a backend for the whole process; help and other commands need no matplotlib."""
    code = (
        "import sys, pathlib, mtrl.report.run_curves, mtrl.report.heat_map, mtrl.tracking.curve\n"
        "assert 'matplotlib' not in sys.modules\n"
        "import matplotlib\n"
        "settings = lambda: {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != 'backend'}\n"
        "before = settings()\n"
        "points = {'reward/overall': [(1, 0.5), (2, 0.7)]}\n"
        "mtrl.report.run_curves.draw_runs(pathlib.Path(sys.argv[1]), {'run': points})\n"
        "assert 'matplotlib.pyplot' not in sys.modules and settings() == before\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "x.svg")], check=True)


# ----------------------------------------------------------------------------------------------------------------- runs
def row(step, attempt=1, **values):
    return {"step": step, "attempt": attempt, "time": 1.0, **{name.replace("__", "/"): x for name, x in values.items()}}


def points(rows):
    return {name: list(curve) for name, curve in history(rows).items()}


def test_a_history_leaves_out_undone_steps():
    """Attempt 1 went to step 4; attempt 2 began again after step 2 and was stopped after step 3."""
    rows = [row(0, val__reward_score=0.1), *(row(step, reward__overall=step) for step in (1, 2))]
    rows += [row(2, val__reward_score=0.2), *(row(step, reward__overall=step) for step in (3, 4))]
    rows += [row(4, val__reward_score=0.4), row(3, attempt=2, reward__overall=30)]
    result = points(rows)
    assert result == {"val/reward_score": [(0, 0.1), (2, 0.2)], "reward/overall": [(1, 1), (2, 2), (3, 30)]}
    validated_again = points([*rows, row(3, attempt=3, val__reward_score=0.3)])
    assert validated_again["reward/overall"] == result["reward/overall"], "a validation comes after its step"


def test_a_history_takes_numbers_alone():
    odd = {"a": None, "b": "x", "c": True, "d": [1], "e": float("nan"), "f": float("inf"), "g": 10**400, "h": 2}
    assert points([row(1, **odd), {"h": 5}, row("2", h=3), row(-1, h=3), row(True, h=3)]) == {"h": [(1, 2.0)]}


def test_a_history_has_the_steps_in_order_whatever_the_order_of_the_rows():
    rows = [row(step, h=step / 2) for step in (3, 1, 4, 1, 9, 2, 6)]
    (curve,) = history([*rows, row(4, h=40.0)]).values()
    assert list(curve) == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 40.0), (6, 3.0), (9, 4.5)]
    assert (curve[0], curve[-1], curve[-2:], len(curve)) == ((1, 0.5), (9, 4.5), [(6, 3.0), (9, 4.5)], 6)


@pytest.mark.parametrize("width", [1, 2, 3, 10, 100])
def test_a_long_curve_is_thinned_out_to_means(width):
    rows = [row(step, h=step**2, **({"late": -step} if step > 40 else {})) for step in range(1, 98)]
    curves = history(rows)
    shown, values = curves["h"].thin_out(width)
    assert len(shown) <= 97 // width + 2 and (shown[-1], values[-1]) == (97, 97**2), "the last value is itself"
    parts = [range(low + 1, high + 1) for low, high in pairwise([0, *shown])]
    assert {step // width for step in parts[0]} == {1 // width} and sum(map(len, parts)) == 97
    assert values == pytest.approx([sum(step**2 for step in part) / len(part) for part in parts])
    assert set(curves["late"].thin_out(width)[0]) <= set(shown), "what is drawn together has the same steps"
    (few,) = history(row(step, v=1.0 * step) for step in (0, 50, 96)).values()
    assert width > 50 or few.thin_out(width) == ([0, 50, 96], [0, 50, 96]), "validations are rare"


def test_one_run_shows_training_and_validation_together():
    run = {"reward/overall": NOISE, "val/reward_score": RATE, "reward/success_rate": NOISE, "val/avg@4": RATE}
    reward, accuracy = usual_panels(run)
    assert (reward.title, reward.bounds) == ("reward", None) and (accuracy.title, accuracy.bounds) == (
        "accuracy",
        (0, 1),
    )
    for panel in (reward, accuracy):
        assert [(line.name, line.noisy) for line in panel.lines] == [("training", True), ("validation", False)]
    (alone,) = usual_panels({"reward/overall": NOISE, "actor/entropy": NOISE})
    assert [line.name for line in alone.lines] == ["training"]


def test_several_runs_are_compared_metric_by_metric():
    runs = {"a": {"reward/overall": NOISE, "val/avg@1": RATE}, "b": {"reward/overall": RATE, "actor/entropy": NOISE}}
    assert usual_metrics(runs) == ["reward/overall", "val/avg@1"]
    reward, accuracy = metric_panels(runs, usual_metrics(runs))
    assert [line.name for line in reward.lines] == ["a", "b"] and [line.name for line in accuracy.lines] == ["a"]
    assert accuracy.title == "accuracy, validation (avg@1)" and accuracy.bounds == (0, 1)


# -------------------------------------------------------------------------------------------------------------- tracker
def write_run(directory, steps=12, more=""):
    directory.mkdir(parents=True)
    rows = [row(0, **{"val/avg@1": 0.25, "val/reward_score": 0.3})]
    for step in range(1, steps + 1):
        rows.append(row(step, **{"reward/overall": step / steps, "reward/success_rate": 0.5, "actor/entropy": 1.5}))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows) + more)
    return directory


def test_a_run_ends_with_its_curve(tmp_path):
    tracker = CurveFile(write_run(tmp_path / "run"))
    tracker.metrics(12, {"reward/overall": 1.0})
    tracker.close()
    with Image.open(tmp_path / "run" / "curve.png") as picture:
        assert picture.width > 1000


def test_without_a_step_there_is_no_curve(tmp_path):
    CurveFile(write_run(tmp_path / "run")).close()
    assert not (tmp_path / "run" / "curve.png").exists(), "only validated"


def test_a_failed_picture_is_reported_and_ends_nothing(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(curve, "draw_runs", refuse)
    tracker = CurveFile(write_run(tmp_path / "run"))
    tracker.metrics(12, {})
    with caplog.at_level(logging.WARNING):
        tracker.close()
    assert "curve.png cannot be drawn (MemoryError: no room)" in caplog.text and "mtrl plot" in caplog.text


# -------------------------------------------------------------------------------------------------------------- command
def test_the_curve_of_a_run_is_redrawn(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert cli.main(["plot", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "curve.png")
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []
    assert (run / "curve.png").stat().st_size > 10_000


def test_runs_and_metrics_in_any_order(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, two = write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run", steps=3)
    calls = []
    monkeypatch.setattr("mtrl.commands.plot.draw_runs", lambda *given: calls.append(given))
    assert cli.main(["plot", str(one), "actor/entropy", f"{two}/metrics.jsonl", "reward/overall", str(one)]) == 0
    assert cli.main(["plot", str(one), "--out", "x.svg"]) == 0
    (path, runs, metrics), (other, _, none) = calls
    assert (
        str(path) == "plot.png" and list(runs) == ["a/run", "b/run"] and metrics == ["actor/entropy", "reward/overall"]
    )
    assert str(other) == "x.svg" and none == []
    assert capsys.readouterr().out == "plot.png\nx.svg\n"


def test_damaged_lines_are_counted_and_left_out(tmp_path, capsys):
    damage = '{"step": 13, "rewa\n\x00\n[1]\n{"no": "step"}\n' + "[" * 100_000 + "\n" + '{"step": ' + "9" * 5000 + "}\n"
    run = write_run(tmp_path / "run", more=damage)
    assert cli.main(["plot", str(run)]) == 0
    assert "metrics.jsonl: 6 of 19 lines are damaged and left out" in capsys.readouterr().err


def test_a_metric_that_some_runs_lack_is_reported(tmp_path, capsys):
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", steps=0)
    out = tmp_path / "x.png"
    assert cli.main(["plot", str(one), str(two), "actor/entropy", "--out", str(out)]) == 0 and out.exists()
    assert "actor/entropy: not recorded by two" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "which run? mtrl plot RUN..."),
        (["nowhere"], "nowhere is no run: there is no such directory"),
        (["empty"], "empty has no metrics.jsonl; name the directory of a run"),
        (["blank"], "blank/metrics.jsonl has no numbers of a step yet"),
        (["broken"], "broken/metrics.jsonl has no numbers of a step; 2 lines are damaged"),
        (
            ["run", "rewrd/overall"],
            "rewrd/overall is neither a run nor a metric; did you mean reward/overall? There are",
        ),
        (["run", "--frob"], "there is no option --frob"),
        (["run", "--out", "x.bmp"], "x.bmp; the name of a picture ends in .png, .svg, .pdf"),
        (["run", "--out", "no/where.png"], "no/where.png cannot be written"),
    ],
)
def test_mistakes_are_reported_in_one_line(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    for name, text in (("empty", None), ("blank", "\n"), ("broken", "x\n{}\n")):
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "metrics.jsonl").write_text(text)
    assert cli.main(["plot", *words]) == cli.USER_ERROR
    result = capsys.readouterr().err
    assert said in result and result.count("\n") == 1 and "Traceback" not in result
    assert not (tmp_path / "run" / "curve.png").exists()


# ----------------------------------------------------------------------------------------------------------- benchmarks
@pytest.mark.parametrize(("name", "pictures"), [("learning_curves", [""]), ("attention_curves", ["_mdi", "_weights"])])
def test_curves_of_benchmarks_are_drawn_again_from_their_numbers(name, pictures, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))  # benchmarks/ is next to the package
    shutil.copy(ROOT / "docs" / f"{name}.json", tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "--redraw", "--out", str(tmp_path / name)])
    import_module(f"benchmarks.{name}").main()
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [f"{name}{picture}.png" for picture in pictures]
