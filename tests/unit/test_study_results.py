"""The study's runs in one small file, the plan's verdicts, and the pages against the raw files."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from benchmarks import study as benchmark
from benchmarks.study import (
    ENTROPY,
    SAMPLED,
    Endpoints,
    across_rates,
    by_windows,
    compare_arms,
    judge,
    keep,
    load,
    planned_pairs,
    write,
)
from mtrl.compare.arms import Arm, SeedRun, read_arm
from mtrl.report.compare_page import apply_holm, compare_with_baseline, format_estimate, format_p

METRIC = "val/avg@1"
STUDY = (benchmark.ROOT / "docs/study.md").read_text(encoding="utf-8")
RESULTS = benchmark.PAGE.read_text(encoding="utf-8")
ROUNDING = 0.00051  # numbers of the pages have three digits


def arm(name, finals):
    return Arm(name, {seed: SeedRun(seed, {METRIC: [(10, 0.1), (30, x)]}) for seed, x in enumerate(finals)})


def write_run(place, seed, final, right):
    place.mkdir(parents=True)
    (place / "config.yaml").write_text(f"dataset: {{seed: {seed}}}\n")
    rows = [{"step": 10, METRIC: 0.12345678}, {"step": 21, SAMPLED: final - 0.4}]
    rows += [{"step": 30, METRIC: final, SAMPLED: final - 0.2, ENTROPY: 0.8, "other": 1.0}]
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


def test_stored_runs_equal_the_originals(study, tmp_path):
    file = tmp_path / "kept.json.gz"
    assert keep([study], file) == {"grpo": [0, 1, 2], "oracle": [0, 1, 2]}
    arms, checks = load(file)
    assert checks["oracle"]["cosine"] == 0.25
    for name in ("grpo", "oracle"):
        there, kept = read_arm(study / name), arms[name]
        assert kept.finals(METRIC) == there.finals(METRIC) and kept.correct() == there.correct()
        curves = kept.runs[1].curves
        assert curves.keys() == {METRIC, SAMPLED, ENTROPY} and curves[METRIC][0] == (10, 0.123457)


def test_seeds_are_added_and_unfinished_ones_are_left_out(study, tmp_path):
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
    assert "| better | 0.411 [" in table, "the sampled accuracy: the mean of steps 21 and 30"
    assert "| grpo at 2e-5 - oracle at 1e-5 | -0.201 [" in page.read_text()
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
def test_the_verdicts_of_the_plan(differences, word):
    plain = arm("grpo", [0.5, 0.5, 0.5])
    (verdict,) = apply_holm(
        [compare_with_baseline(arm("other", [0.5 + x for x in differences]), plain, METRIC)], "by_final"
    )
    assert judge(verdict) == word


def test_pairs_are_arms_of_the_study():
    from benchmarks.study import BASELINE, DRAWN, PAIRS
    from mtrl.config.packaged import CONFIG_DIR

    names = {path.stem for path in Path(CONFIG_DIR / "study").glob("*.yaml")}
    assert {BASELINE, *DRAWN, *(name for pair in PAIRS for name in pair)} <= names


# ----------------------------------------------------------------------------------------------------- both endpoints
def test_sampled_accuracy_is_the_mean_of_the_last_ten_steps():
    points = [(step, 1.0 if step == 20 else step / 100) for step in range(1, 31)]
    means = by_windows(Arm("grpo", {0: SeedRun(0, {SAMPLED: points})})).runs[0].curves[SAMPLED]
    assert [last for last, _ in means] == [10, 20, 30]
    assert means[-1][1] == pytest.approx(0.255), "steps 21 to 30, without step 20"


def test_each_endpoint_has_its_own_differences_and_correction():
    def load_arm(name, greedy, sampled):
        curves = zip(greedy, sampled, strict=True)
        return Arm(
            name, {seed: SeedRun(seed, {METRIC: [(30, g)], SAMPLED: [(30, s)]}) for seed, (g, s) in enumerate(curves)}
        )

    found = {
        "grpo": load_arm("grpo", [0.5, 0.5, 0.5], [0.4, 0.4, 0.4]),
        "a": load_arm("a", [0.60, 0.61, 0.62], [0.30, 0.31, 0.32]),
        "b": load_arm("b", [0.5, 0.6, 0.4], [0.4, 0.5, 0.3]),
    }
    _, a, b = compare_arms(found)[0]
    assert a.greedy.by_final.difference.mean == pytest.approx(0.11)
    assert a.sampled.by_final.difference.mean == pytest.approx(-0.09)
    for side in ("greedy", "sampled"):  # two arms: the smaller p counts twice, for any p of the other endpoint
        assert getattr(a, side).by_final.adjusted == pytest.approx(2 * getattr(a, side).by_final.p)
        assert getattr(b, side).by_final.adjusted == getattr(b, side).by_final.p


# --------------------------------------------------------------------------------------- the pages and the raw files
@dataclass(frozen=True)
class Computed:
    """Comparisons of the committed raw files, by their names on the pages."""

    arms: dict[str, Arm]
    at: dict[str, dict[str, Endpoints]]  # by rate and arm
    pairs: dict[str, Endpoints]

    def verdicts(self):
        everything = [*self.pairs.values(), *(each for rate in self.at.values() for each in rate.values())]
        return [side for each in everything for side in (each.greedy, each.sampled)]


@pytest.fixture(scope="module")
def computed():
    once, twice = load(benchmark.KEPT)[0], load(benchmark.TWICE)[0]
    at = {}
    for rate, found in (("1e-5", once), ("2e-5", twice)):
        compared, metric = compare_arms(found)
        at[rate] = {each.greedy.arm.name: each for each in compared}
    return Computed(once, at, planned_pairs(once, metric) | across_rates(once, twice, metric))


def parse_tables(page):
    """Each table as its heads and its rows."""
    found, here = [], []
    for line in [*map(str.strip, page.splitlines()), ""]:
        if line.startswith("|"):
            here.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif here:
            found.append((here[0], here[2:]))
            here = []
    return found


def close(written, value):
    return abs(float(written) - value) <= ROUNDING


def same_p(written, p):
    return p < 0.001 + ROUNDING if written == "<0.001" else close(written, p)


def same_estimate(written, value):
    mean, low, high = re.fullmatch(r"([+-]?[\d.]+) \[([+-]?[\d.]+), ([+-]?[\d.]+)\]", written).groups()
    return close(mean, value.mean) and close(low, value.low) and close(high, value.high)


def check_side(heads, row, side, verdict):
    """The cells of one endpoint in a row: [accuracy,] difference, p, Holm[, verdict]."""
    start = next(place for place, head in enumerate(heads) if head.startswith(side))
    cells = row[start:]
    if heads[start + 1].startswith("to "):
        assert same_estimate(cells[0], verdict.final)
        cells = cells[1:]
    test = verdict.by_final
    if test is None:
        assert cells[:3] == ["", "", ""]
        return
    assert same_estimate(cells[0], test.difference) and same_p(cells[1], test.p) and same_p(cells[2], test.adjusted)
    if "verdict" in heads:
        assert cells[3] == judge(verdict)


def check_row(heads, row, each):
    check_side(heads, row, "greedy", each.greedy)
    check_side(heads, row, "sampled", each.sampled)


def test_tables_of_the_results_agree_with_the_raw_files(computed):
    compared = [(heads, rows) for heads, rows in parse_tables(RESULTS) if "Holm" in heads and "sampled" in heads]
    once, pairs, twice, rates = compared
    for (heads, rows), rate in ((once, "1e-5"), (twice, "2e-5")):
        assert {row[0] for row in rows} == computed.at[rate].keys()
        for row in rows:
            each = computed.at[rate][row[0]]
            check_row(heads, row, each)
            assert row[1] == str(len(each.greedy.arm.runs))
    assert [row[0] for _, rows in (pairs, rates) for row in rows] == [*computed.pairs]
    for heads, rows in (pairs, rates):
        for row in rows:
            check_row(heads, row, computed.pairs[row[0]])
    (everything,) = [rows for heads, rows in parse_tables(RESULTS) if "area" in heads]
    for name, _, final, _, difference, p, after_holm, *_ in everything:
        verdict = computed.at["1e-5"][name].greedy
        assert same_estimate(final, verdict.final)
        if test := verdict.by_final:
            assert same_estimate(difference, test.difference)
            assert same_p(p, test.p) and same_p(after_holm, test.adjusted)


def test_tables_of_the_study_agree_with_the_raw_files(computed):
    compared = [(heads, rows) for heads, rows in parse_tables(STUDY) if "Holm" in heads]
    assert len(compared) == 2 and sum(len(rows) for _, rows in compared) >= 20
    for heads, rows in compared:
        for row in rows:
            check_row(heads, row, computed.at[row[1]][row[0].strip("`")])


def test_the_study_sorts_arms_by_their_verdicts(computed):
    """Every arm that is neither a control nor an experiment, by its verdicts."""
    (rows,) = [rows for heads, rows in parse_tables(STUDY) if heads == ["greedy", "sampled", "arms"]]
    named = {}
    for greedy, sampled, arms in rows:
        named |= dict.fromkeys(re.findall(r"\w+", arms), (greedy, sampled))
    found = {name: (judge(each.greedy), judge(each.sampled)) for name, each in computed.at["1e-5"].items()}
    assert named == {name: found[name] for name in named}
    others = {"grpo", "grpo_matched", "blank", "bottom", "shuffled_tokens", "shuffled_rows"}
    assert {name for name in found if not re.match("random_|experiment", name)} - others == named.keys()


def prose_of_results():
    """The results text of the study's page, without its plan and without tables of comparisons."""
    head, _, rest = STUDY.partition("## Question")
    text = head + rest.partition("\n## Results\n")[2]
    return "\n".join(line for line in text.splitlines() if not re.match(r"\| `\w+` \| \de-5 \|", line))


def test_numbers_in_sentences_are_of_the_results():
    """Three digits after the point: each number is in study_results.md, with its sign where it has one."""
    old = {"0.135", "0.219"}  # withdrawn, and quoted
    numbers = set(re.findall(r"(?<![\d.])[+-]?\d\.\d{3}(?!\d)", prose_of_results())) - old
    assert len(numbers) > 50
    assert {number for number in numbers if number not in RESULTS} == set()


def test_differences_in_sentences_have_the_p_of_the_same_comparison(computed):
    tests = [verdict.by_final for verdict in computed.verdicts() if verdict.by_final]
    known = {
        (format_estimate(test.difference, signed=True).split()[0], format_p(test.p), format_p(test.adjusted))
        for test in tests
    }
    text = " ".join(prose_of_results().split())
    quoted = re.findall(r"([+-]0\.\d{3}),? \(?p (<?0\.\d{3})(?:, Holm (<?0\.\d{3}))?", text)
    assert len(quoted) >= 15
    for difference, p, after_holm in quoted:
        assert any(test[:2] == (difference, p) and after_holm in ("", test[2]) for test in known), (
            f"docs/study.md: no comparison has {difference} with p {p} {after_holm}"
        )
    assert set(re.findall(r"\bp (<?0\.\d+)", text)) <= {p for _, p, _ in known}


def test_too_small_to_matter_holds_by_the_t_interval_where_the_study_says_so(computed):
    from scipy.stats import t

    wider = {}
    for rate, compared in computed.at.items():
        for name, each in compared.items():
            for side in ("greedy", "sampled"):
                verdict, base = getattr(each, side), getattr(compared["grpo"], side)
                if judge(verdict) != "too small to matter":
                    continue
                metric = METRIC if side == "greedy" else SAMPLED
                ours, theirs = verdict.arm.finals(metric), base.arm.finals(metric)
                differences = np.array([ours[seed] - theirs[seed] for seed in ours if seed in theirs])
                half = t.ppf(0.975, len(differences) - 1) * differences.std(ddof=1) / len(differences) ** 0.5
                if abs(differences.mean()) + half >= benchmark.SMALL:
                    wider.setdefault((rate, side), []).append(name)
    assert wider == {("2e-5", "sampled"): ["key_tokens", "tgf_40"]}


def test_the_seeds_of_the_baseline_that_arms_are_compared_with(computed):
    few = Arm("grpo", {seed: run for seed, run in computed.arms["grpo"].runs.items() if seed < 5})
    greedy, sampled = (np.mean([*arm.finals(m).values()]) for arm, m in ((few, METRIC), (by_windows(few), SAMPLED)))
    assert f"grpo is at {greedy:.3f} greedy and {sampled:.3f} sampled" in RESULTS
    assert f"{greedy:.3f} and {sampled:.3f} on seeds 0 to 4" in " ".join(STUDY.split())
