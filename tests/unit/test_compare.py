"""`mtrl compare`: existing runs, and batches that end early, fail and resume. Runs are written by hand here; a real
batch is at the end, among the slow tests."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import slow_but
from run_helpers import wait_for

from mtrl.cli import main
from mtrl.commands import compare
from mtrl.commands.compare import parse_seeds
from mtrl.compare import batch
from mtrl.compare.arms import read_arm
from mtrl.compare.batch import measure_effects, pack, plan_jobs, run_batch, unpack
from mtrl.config import load_config
from mtrl.report.compare_html import Comparison
from mtrl.utils import package_version


def write_run(place, seed, curve, right=(), seconds=2.0):
    place.mkdir(parents=True)
    (place / "config.yaml").write_text(f"dataset: {{seed: {seed}}}\n")
    rows = [{"step": step, "val/avg@1": value} for step, value in enumerate(curve)]
    rows += [{"step": step + 1, "perf/seconds_step": 100.0 if step == 0 else seconds} for step in range(len(curve))]
    (place / "metrics.jsonl").write_text("".join(f"{json.dumps({'attempt': 1} | row)}\n" for row in rows))
    answers = [
        {"step": step, "id": f"q{number}", "rewards": {"accuracy": float(known and step > 0)}}
        for step in (0, len(curve) - 1)
        for number, known in enumerate(right)
    ]
    (place / "validations.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in answers))
    return place


@pytest.fixture
def two_arms(tmp_path):
    for seed in range(4):
        write_run(tmp_path / f"plain/seed_{seed}", seed, [0.3, 0.4 + 0.1 * seed], [1, 0, 0])
        write_run(tmp_path / f"better/seed_{seed}", seed, [0.3, 0.5 + 0.102 * seed], [1, 1, 0], seconds=3.0)
    return tmp_path


# ------------------------------------------------------------------------------------------------ runs that are there
def test_runs_that_are_there_are_compared(two_arms, monkeypatch, capsys):
    monkeypatch.chdir(two_arms)
    assert main(["compare", "plain", "better", "--out", "found"]) == 0
    page, found = (two_arms / "found/comparison.md").read_text(), json.loads(Path("found/comparison.json").read_text())
    plain, better = found["arms"]
    assert plain["final"]["mean"] == pytest.approx(0.55) and better["by_final"]["difference"]["mean"] == pytest.approx(
        0.103
    )
    assert better["by_final"]["p"] < 0.001 and better["by_final"]["adjusted"] == better["by_final"]["p"], (
        "one comparison"
    )
    assert better["questions"] == {"gained": 4, "lost": 0, "p": pytest.approx(0.125)}
    assert (plain["seconds_step"], better["seconds_step"]) == (2.0, 3.0), "without the first step"
    assert "| better | 4 | 0.653 [" in page and "+0.103 [" in page and "| 4, 0 | 0.125 | 3.00 |" in page
    assert Path("found/comparison.png").stat().st_size > 10_000
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["arms"] == {"plain": 4, "better": 4}


def test_a_notebook_shows_curves_and_the_table(two_arms):
    arms = [replace(read_arm(two_arms / name / "seed_0"), name=name) for name in ("plain", "better")]
    comparison = Comparison(arms)
    html = comparison._repr_html_()
    assert html.count("<img") == 1 and html.count("<tr>") == 3 and "Holm" not in html, "there is one seed"
    assert "<td>better</td><td>1</td><td>0.500</td>" in html and "<td>1, 0</td>" in html
    assert repr(comparison).startswith("# 2 arms compared by accuracy")


def test_single_runs_have_no_interval(two_arms, monkeypatch):
    monkeypatch.chdir(two_arms)
    assert main(["compare", "plain/seed_0", "better/seed_0"]) == 0
    page = Path("comparison/comparison.md").read_text()
    assert "| seed_0 | 1 | 0.400 | 0.350 |" in page and "+0.100 | - | - |" in page


def test_a_rule_is_named_and_its_metrics_compared(tmp_path, monkeypatch):
    """One run with a published rule against a plain one, and against one with the same rule at another strength."""
    monkeypatch.chdir(tmp_path)
    vepo = {"name": "vepo", "noise": 6.9}
    credits = {"plain": [], "pgpo": ["pgpo"], "vepo": [vepo], "milder": [vepo | {"a": 0.5}]}
    shared = {"actor/pg_loss": 0.25, "reward/overall": 0.5}
    measured = {"pgpo": {"signal/logprobs@none": -1.5}, "vepo": {"signal/jsd@noised(6.9)": 0.125}}
    for seed, (name, credit) in enumerate(credits.items()):
        place = write_run(tmp_path / name, seed, [0.3, 0.4])
        config = {
            "dataset": {"seed": seed}, "optimization": {"credit": credit, "gamma": 1.0},
            "training": {"experiment_name": name}, "worker": {"actor": {"clip_ratio_high": 0.3 if credit else 0.28}},
        }  # fmt: skip
        (place / "config.yaml").write_text(json.dumps(config))
        own = measured.get(name, measured["vepo"] if credit else {})
        with (place / "metrics.jsonl").open("a") as file:
            file.writelines(f"{json.dumps({'step': step, 'attempt': 1} | shared | own)}\n" for step in (1, 2))
    assert main(["compare", "plain", "pgpo"]) == 0
    page, found = (
        Path("comparison/comparison.md").read_text(),
        json.loads(Path("comparison/comparison.json").read_text()),
    )
    assert found["settings"] == {
        "optimization.credit": ["[]", '["pgpo"]'], "worker.actor.clip_ratio_high": ["0.28", "0.3"],
    }  # fmt: skip
    assert found["rule_metrics"] == {"signal/logprobs@none": [None, -1.5]}, "loss and reward are in both"
    assert '| `optimization.credit` | `[]` | `["pgpo"]` |' in page and "| `signal/logprobs@none` |  | -1.5 |" in page
    assert main(["compare", "vepo", "milder"]) == 0
    found = json.loads(Path("comparison/comparison.json").read_text())
    assert [*found["settings"]] == ["optimization.credit"] and '"a": 0.5' in found["settings"]["optimization.credit"][1]
    assert found["rule_metrics"] == {"signal/jsd@noised(6.9)": [0.125, 0.125]}, "also if both have the rule"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plain"], "two configurations or runs"),
        (["plain", "nothing"], "nothing"),
        (["plain", "empty"], "holds no run with metrics"),
        (["plain", "twice"], "has the seed 0"),
        (["plain", "better", "--seeds", "many"], "--seeds: many"),
        (["plain", "better", "--seeds", "9-5"], "--seeds: 9-5 is no range"),
        (["plain", "better", "--seeds", "5-"], "--seeds: 5- is no range"),
        (["plain", "better", "--sedes", "3"], "no option --sedes"),
        (["plain", "better", "training.max_steps=3"], "overrides are for configurations"),
        (["plain", "without"], "no validation metric in common"),
    ],
)
def test_wrong_arguments_are_reported(two_arms, monkeypatch, capsys, words, message):
    monkeypatch.chdir(two_arms)
    Path("empty").mkdir()
    for name in ("a", "b"):
        write_run(Path("twice") / name, 0, [0.1])
    (write_run(Path("without/run"), 0, [0.1]) / "metrics.jsonl").write_text('{"step": 1, "reward/overall": 1.0}\n')
    assert main(["compare", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("text", "seeds"), [("3", range(3)), ("5-9", range(5, 10)), ("7-7", range(7, 8))])
def test_seeds_are_the_first_or_a_range(text, seeds):
    assert parse_seeds(text) == seeds


def test_the_last_validation_counts(tmp_path):
    arm = read_arm(write_run(tmp_path / "run", 3, [0.0, 0.5], [1, 0]))
    assert arm.runs[3].correct == {"q0": True, "q1": False}
    assert arm.correct() == {"3 q0": True, "3 q1": False}


# --------------------------------------------------------------------------------------------------------- batches
FAKE_RUN = textwrap.dedent(
    """
    import json, os, signal, sys, time
    from pathlib import Path

    keys = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    place = Path(keys["training.output_dir"], keys["training.project_name"], keys["training.experiment_name"])
    (place / "checkpoints").mkdir(parents=True, exist_ok=True)
    (place / "checkpoints/weights").write_bytes(bytes(1000))
    signal.signal(signal.SIGTERM, lambda *_: (print("saved"), sys.exit(143)))
    print("begun with", os.environ.get("OMP_NUM_THREADS"), "threads", flush=True)
    seed = int(keys["dataset.seed"])
    assert keys["worker.rollout.seed"] == keys["dataset.seed"]
    behaviour = Path(sys.argv[1]).read_text()
    if behaviour == "slow":
        time.sleep(60)
    if behaviour == "fails":
        sys.exit("it cannot be")
    (place / "config.yaml").write_text(f"dataset: {{seed: {seed}}}")
    (place / "metrics.jsonl").write_text(json.dumps({"step": 1, "val/avg@1": 0.5 + seed / 10}))
    """
)


@pytest.fixture
def fake_runs(tmp_path, monkeypatch):
    """A fake of `mtrl train`: it takes the same arguments and writes the files of a run at once."""
    script = tmp_path / "fake_run.py"
    script.write_text(FAKE_RUN)
    real = batch.SeedJob.command
    monkeypatch.setattr(batch.SeedJob, "command", lambda job: [sys.executable, str(script), *real(job)[4:]])
    for name in ("one", "two", "slow", "fails"):
        (tmp_path / f"{name}.txt").write_text(name)
    return tmp_path


def jobs(folder, *names, seeds=2):
    return plan_jobs({name: str(folder / f"{name}.txt") for name in names}, range(seeds), [], folder / "out")


def test_a_batch_runs_everything_once(fake_runs):
    said = []
    assert run_batch(jobs(fake_runs, "one", "two"), 2, None, said.append) == (0, 0)
    assert len([line for line in said if line.startswith("finished")]) == 4
    assert read_arm(fake_runs / "out/one").finals("val/avg@1") == {0: 0.5, 1: 0.6}
    said.clear()
    assert run_batch(jobs(fake_runs, "one", "two"), 2, None, said.append) == (0, 0)
    assert said == ["4 of 4 runs are done already"]


def test_a_failed_run_is_reported_and_the_others_continue(fake_runs):
    said = []
    assert run_batch(jobs(fake_runs, "fails", "one", seeds=1), 1, None, said.append) == (1, 0)
    assert any("failed   fails seed 0 (status 1)" in line and "it cannot be" in line for line in said)
    assert (fake_runs / "out/one/seed_0.done").exists() and not (fake_runs / "out/fails/seed_0.done").exists()


@pytest.fixture
def time_is_up_after_one(fake_runs, monkeypatch):
    """Three seconds have passed when the run `one` is done and `slow` has begun, however long that takes."""
    done, log = fake_runs / "out/one/seed_0.done", fake_runs / "out/slow/seed_0.log"

    def now():
        return 3.0 if done.exists() and log.exists() and "begun" in log.read_text() else 0.0

    monkeypatch.setattr(batch.time, "monotonic", now)


def test_a_batch_ends_in_time_and_resumes(fake_runs, time_is_up_after_one):
    given = jobs(fake_runs, "one", "slow", seeds=1)
    assert run_batch(given, 2, 3.0, lambda line: None) == (0, 1)
    assert "saved" in (fake_runs / "out/slow/seed_0.log").read_text(), "it was interrupted, not killed"
    (fake_runs / "slow.txt").write_text("quick now")
    assert run_batch(given, 2, None, lambda line: None) == (0, 0)


def test_an_archive_resumes_elsewhere_without_the_weights_of_finished_runs(fake_runs, time_is_up_after_one):
    given = jobs(fake_runs, "one", "slow", seeds=1)
    run_batch(given, 2, 3.0, lambda line: None)
    pack(fake_runs / "out", fake_runs / "batch.tar.gz", given)
    elsewhere = fake_runs / "elsewhere/out"
    elsewhere.parent.mkdir()
    unpack(fake_runs / "batch.tar.gz", elsewhere)
    assert (elsewhere / "one/seed_0.done").exists() and (elsewhere / "one/seed_0/metrics.jsonl").exists()
    assert not (elsewhere / "one/seed_0/checkpoints").exists()
    assert (elsewhere / "slow/seed_0/checkpoints/weights").exists()


def test_runs_of_a_killed_batch_save_and_stop(fake_runs, tmp_path):
    """The batch is killed without a chance to stop its runs."""
    script = tmp_path / "batch.py"
    script.write_text(f"""
import sys
from pathlib import Path
from mtrl.compare import batch
code = "from mtrl.utils.machine import stop_with_parent; stop_with_parent(); "
code += "import sys; sys.argv = sys.argv[:1] + sys.argv[2:]; exec(open({str(tmp_path / "fake_run.py")!r}).read())"
real = batch.SeedJob.command
batch.SeedJob.command = lambda job: [sys.executable, "-c", code, "", *real(job)[4:]]
jobs = batch.plan_jobs({{"slow": {str(tmp_path / "slow.txt")!r}}}, range(1), [], Path({str(tmp_path / "out")!r}))
batch.run_batch(jobs, 1, None, print)
""")
    log = tmp_path / "out/slow/seed_0.log"
    process = subprocess.Popen([sys.executable, str(script)])
    wait_for(lambda: log.is_file() and "begun" in log.read_text(), "start")
    process.kill()
    process.wait()
    wait_for(lambda: "saved" in log.read_text(), "save")


def test_a_run_that_an_earlier_batch_still_writes_is_waited_for(fake_runs):
    """A killed batch is started again at once: its runs are saving, and a second process would be refused."""
    first, second = jobs(fake_runs, "one", "two", seeds=1)
    first.directory.mkdir(parents=True)
    said = []
    with (first.directory / "run.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def log(line):
            said.append(line)
            if line == "finished two seed 0":
                fcntl.flock(lock, fcntl.LOCK_UN)

        assert run_batch([first, second], 1, 60.0, log) == (0, 0)
    assert said[0].startswith("waiting  one seed 0: another process still uses")
    assert said[1:] == [f"{what} {name} seed 0" for name in ("two", "one") for what in ("started ", "finished")]


@pytest.mark.slow
def test_the_check_of_a_killed_batch_stops(tmp_path):
    """It would keep its model in memory beside those of the next batch."""
    (tmp_path / "never.py").write_text("import time\ndef score(data):\n    time.sleep(600)\n")
    config = tmp_path / "never.yaml"
    config.write_text(f"worker: {{reward: {{functions: [{tmp_path / 'never.py'}:score], timeout_s: 900}}}}")
    script = f"""
from pathlib import Path
from mtrl.compare import batch
batch.measure_effects(batch.plan_jobs({{"never": {str(config)!r}}}, [0], [], Path({str(tmp_path / "out")!r})), 1)
"""
    process = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"TMPDIR": str(tmp_path)})
    wait_for(lambda: list(tmp_path.glob("tmp*/mtrl/*/config.yaml")), "check")
    process.kill()
    process.wait()
    wait_for(lambda: not list(tmp_path.glob("tmp*")), "end of the check, and of its folder")


@pytest.mark.parametrize(
    ("at_once", "given", "threads"), [(1, None, "None"), (3, None, "5"), (99, None, "1"), (3, "7", "7")]
)
def test_parallel_runs_share_the_cores(fake_runs, monkeypatch, at_once, given, threads):
    monkeypatch.setattr(batch.os, "sched_getaffinity", lambda process: range(16), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    run_batch(jobs(fake_runs, "one", seeds=1), at_once, None, lambda line: None)
    assert f"begun with {threads} threads" in (fake_runs / "out/one/seed_0.log").read_text()


def test_arms_are_checked_at_once_and_only_once(tmp_path, monkeypatch):
    together, asked = threading.Barrier(2, timeout=30), []

    def measured(command, **others):
        asked.append(command[3])
        together.wait()  # the other one has started, too
        return subprocess.CompletedProcess(command, 0, f'loading\n{{"cosine": {len(command[3])}}}\n', "")

    monkeypatch.setattr(batch.subprocess, "run", measured)
    for _ in range(2):
        found = measure_effects(jobs(tmp_path, "one", "three"), 2)
        assert list(found) == ["one", "three"] and found["one"]["cosine"] == len(str(tmp_path / "one.txt"))
    assert len(asked) == 2


# ------------------------------------------------------------------------------------------ results of other settings
RATE = "worker.actor.optim.lr"


@pytest.fixture
def configured(tmp_path, monkeypatch):
    """Two configurations, and a fake of what `mtrl compare` starts: each start is recorded, nothing is trained."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "score.py").write_text("def score(data): return 1.0")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    for name in ("a", "b"):
        reward = "worker: {reward: {functions: [score.py:score]}}"
        (tmp_path / f"{name}.yaml").write_text(f"dataset: {{train_files: rows.jsonl, seed: 3}}\n{reward}\n")
    started = []

    def start(job, environment):
        started.append(job.name)
        job.directory.mkdir(parents=True)
        (job.directory / "config.yaml").write_text(f"dataset: {{seed: {job.seed}}}")
        (job.directory / "metrics.jsonl").write_text(json.dumps({"step": 1, "val/avg@1": 0.5}))
        return subprocess.Popen([sys.executable, "-S", "-c", ""])

    effect = {"cosine": 1.0, "tokens": 1.0, "norm": 1.0}
    monkeypatch.setattr(batch, "start", start)
    done = subprocess.CompletedProcess([], 0, json.dumps(effect), "")
    monkeypatch.setattr(batch.subprocess, "run", lambda command, **others: done)
    monkeypatch.setattr(compare, "make_effects_page", lambda checks: "")
    monkeypatch.setattr(compare, "report", lambda *given: 0)
    return started


def change(file, old, new):
    path = Path(file)
    path.write_text(path.read_text().replace(old, new))


def compared(*overrides):
    return main(["compare", "a.yaml", "b.yaml", "--seeds", "1", "--out", "out", *overrides])


CHANGES = {
    "a key": (
        lambda: change("a.yaml", "dataset:", "optimization: {gamma: 0.5}\ndataset:"),
        "optimization.gamma: was 1.0, is 0.5",
    ),
    "an override": (None, f"{RATE}: was 1e-06, is 0.0005"),
    "rows": (lambda: change("rows.jsonl", "b", "c"), "train data: was "),
    "the user's code": (lambda: change("score.py", "1.0", "2.0"), "worker.reward.functions: was "),
    "a file without its settings": (
        lambda: Path("out/a/seed_0.done").write_text(""),
        "did not store what it depends on",
    ),
    "the effects alone": (
        lambda: Path("out/a/manipulation.json").write_text('{"cosine": 1.0}'),
        "manipulation.json was made by a version that did not store",
    ),
}


@pytest.mark.parametrize("case", slow_but(CHANGES, "a key"))
def test_a_result_of_other_settings_is_no_result(case, configured, capsys):
    assert compared() == 0 and configured == ["a seed 0", "b seed 0"]
    assert compared() == 0 and len(configured) == 2, "nothing has changed"
    apply, message = CHANGES[case]
    if apply is not None:
        apply()
    assert compared(*([f"{RATE}=5e-4"] if apply is None else [])) == 2
    said = capsys.readouterr().err
    assert message in said and "name another --out, or delete" in said and len(configured) == 2


def test_other_code_is_other_settings(configured, capsys, monkeypatch):
    assert compared() == 0
    monkeypatch.setattr(package_version, "PACKAGE", Path("."))
    assert compared() == 2 and "code: was mtrl" in capsys.readouterr().err


def test_a_batch_resumes_in_another_folder(configured, monkeypatch, tmp_path):
    assert compared() == 0
    shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}_moved")
    monkeypatch.chdir(tmp_path.parent / f"{tmp_path.name}_moved")
    assert compared() == 0 and len(configured) == 2, "files are known by their contents"


def test_the_command_resumes_from_an_archive(configured):
    """In a directory that has nothing but the archive: finished runs are not run again."""
    assert compared("--archive", "batch.tar.gz") == 0 and len(configured) == 2
    shutil.rmtree("out")
    assert compared("--archive", "batch.tar.gz") == 0 and len(configured) == 2
    assert Path("out/a/seed_0/metrics.jsonl").is_file()


def test_runs_that_start_later_read_what_was_checked(configured):
    assert compared() == 0
    frozen = load_config("out/a/arm.yaml")
    assert frozen.dataset.seed == 3 and frozen.worker.reward.functions[0].endswith("score.py:score")


@pytest.mark.slow
def test_a_real_batch(tmp_path, monkeypatch, capsys):
    """Two configurations of the embedded task, two seeds: runs of one seed begin with the same responses."""
    monkeypatch.chdir(tmp_path)
    words = [
        "mtrl:zoo/grpo",
        "mtrl:zoo/tprl_filtering",
        "--seeds",
        "2",
        "--jobs",
        "2",
        "--out",
        "out",
        "training.max_steps=2",
    ]
    assert main(["compare", *words]) == 0
    curves = {arm.name: arm.runs for arm in (read_arm(Path("out") / name) for name in ("grpo", "tprl_filtering"))}
    for seed in (0, 1):
        plain, filtered = (dict(curves[name][seed].curves["reward/overall"]) for name in ("grpo", "tprl_filtering"))
        assert plain[1] == filtered[1]
    assert "| tprl_filtering | 2 |" in capsys.readouterr().out
