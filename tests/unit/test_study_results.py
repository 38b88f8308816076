"""The study's runs in one small file, and what the plan calls an effect."""

import json
from pathlib import Path

import pytest

from benchmarks.study import keep, load, word_of, write
from mtrl.compare.arms import Arm, SeedRun, read_arm
from mtrl.compare.pages import adjusted, judge

METRIC = "val/avg@1"


def arm(name, finals):
    return Arm(name, {seed: SeedRun(seed, {METRIC: [(10, 0.1), (30, x)]}) for seed, x in enumerate(finals)})


def write_run(place, seed, final, right):
    place.mkdir(parents=True)
    (place / "config.yaml").write_text(f"dataset: {{seed: {seed}}}\n")
    rows = [{"step": 10, METRIC: 0.12345678}, {"step": 30, METRIC: final, "other": 1.0}]
    (place / "metrics.jsonl").write_text("".join(f"{json.dumps({'attempt': 1} | row)}\n" for row in rows))
    answers = [{"step": 30, "id": f"q{i}", "rewards": {"accuracy": float(x)}} for i, x in enumerate(right)]
    (place / "validations.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in answers))
    place.with_suffix(".done").touch()


@pytest.fixture
def study(tmp_path):
    for seed in range(3):
        write_run(tmp_path / f"study/grpo/seed_{seed}", seed, 0.5 + 0.01 * seed, [1, 0, 0])
        write_run(tmp_path / f"study/oracle/seed_{seed}", seed, 0.7 + 0.011 * seed, [1, 1, 0])
    check = dict.fromkeys(("cosine", "size", "kept_surprise", "effective_tokens", "plain_tokens"), 0.25)
    (tmp_path / "study/oracle/manipulation.json").write_text(json.dumps(check))
    return tmp_path / "study"


def test_what_is_kept_is_what_was_there(study, tmp_path):
    file = tmp_path / "kept.json.gz"
    assert keep([study], file) == {"grpo": [0, 1, 2], "oracle": [0, 1, 2]}
    arms, checks = load(file)
    assert checks["oracle"]["cosine"] == 0.25
    for name in ("grpo", "oracle"):
        there, kept = read_arm(study / name), arms[name]
        assert kept.finals(METRIC) == there.finals(METRIC) and kept.right() == there.right()
        assert kept.runs[1].curves.keys() == {METRIC} and kept.runs[1].curves[METRIC][0] == (10, 0.123457)


def test_seeds_are_added_and_what_is_not_done_is_left_out(study, tmp_path):
    file = tmp_path / "kept.json.gz"
    keep([study], file)
    first = file.read_bytes()
    more = tmp_path / "more"
    for seed in (3, 4):
        write_run(more / f"grpo/seed_{seed}", seed, 0.6, [1, 1, 1])
    (more / "grpo/seed_4.done").unlink()
    assert keep([more], file) == {"grpo": [0, 1, 2, 3], "oracle": [0, 1, 2]}
    keep([study], tmp_path / "again.json.gz")
    assert (tmp_path / "again.json.gz").read_bytes() == first, "the same runs, the same bytes"


def test_tables_and_picture_come_from_the_file(study, tmp_path):
    file, page, picture = tmp_path / "kept.json.gz", tmp_path / "results.md", tmp_path / "study.png"
    keep([study], file)
    twice = tmp_path / "twice.json.gz"
    table = write(file, page, picture, twice)
    assert "twice the rate" not in page.read_text()
    keep([study, file], twice)  # a file as good as a directory
    table = write(file, page, picture, twice)
    assert page.read_text().partition("twice the rate")[2].count(table) == 1
    assert "| oracle | 3 | 0.711 [" in table and "| better |" in table and "| grpo | 3 | 0.510 [" in table
    assert table in page.read_text() and picture.stat().st_size > 10_000
    assert "2 of 2 arms have fewer than 5 seeds" in page.read_text()
    for name in ("grpo", "oracle"):
        for seed in (3, 4):
            write_run(study / name / f"seed_{seed}", seed, 0.5, [1, 0, 0])
    keep([study], file)
    write(file, page, picture, twice)
    assert "fewer than" not in page.read_text()


@pytest.mark.parametrize(
    ("differences", "word"),
    [
        ([0.050, 0.051, 0.049], "better"),
        ([-0.050, -0.051, -0.049], "worse"),
        ([0.01, -0.01, 0.0], "too small to matter"),
        ([0.1, -0.1, 0.0], "open"),
        ([0.019, 0.021, -0.010], "open"),  # the interval ends beyond 0.02
    ],
)
def test_the_words_of_the_plan(differences, word):
    plain = arm("grpo", [0.5, 0.5, 0.5])
    (verdict,) = adjusted([judge(arm("other", [0.5 + x for x in differences]), plain, METRIC)], "by_final")
    assert word_of(verdict) == word


def test_pairs_are_arms_of_the_study():
    from benchmarks.study import BASELINE, DRAWN, PAIRS
    from mtrl.config.packaged import HOME

    names = {path.stem for path in Path(HOME / "study").glob("*.yaml")}
    assert {BASELINE, *DRAWN, *(name for pair in PAIRS for name in pair)} <= names
