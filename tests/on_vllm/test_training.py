"""Whole runs by the command line, with responses of a real vLLM."""

import json
import signal
import time

import pytest
from run_helpers import finish, get_run_dir, read_metrics, same_end, start, train_arguments
from vllm_engines import INSTALLED

from mtrl import cli
from mtrl.checkpoint.folder_store import list_checkpoints
from mtrl.embedded.embedded_rows import MODEL_DIRECTORY, SIZES

pytestmark = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")

ON_VLLM = "worker.rollout.name=vllm"
TOKEN_WEIGHTS = (
    "optimization.enable_token_weights=true"  # by attention, in addition to the filter and the shaping of zoo.yaml
)
SETTINGS = (
    ON_VLLM, TOKEN_WEIGHTS, "training.max_steps=4", "training.save_freq=1", "training.val_freq=2",
    "training.save_limit=2",
)  # fmt: skip
STEPS = 10


def gaps(run):
    """The largest distance of a token's log-prob to the trainer's, of each step."""
    rows = [row for row in read_metrics(run).values() if "rollout/logprob_gap_max" in row]
    return [row["rollout/logprob_gap_max"] for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run."""
    output = tmp_path_factory.mktemp("whole")
    assert cli.main(train_arguments(output, *SETTINGS)) == 0
    return get_run_dir(output)


@pytest.mark.parametrize("mode", ["inprocess", "process"])
def test_a_killed_run_resumes_bitwise(tmp_path, whole, mode):
    """Bitwise, in every mode of the engine."""
    command = train_arguments(tmp_path, *SETTINGS, f"worker.rollout.mode={mode}")
    process = start(command)
    while process.poll() is None and not list_checkpoints(get_run_dir(tmp_path) / "checkpoints"):
        time.sleep(0.002)
    process.kill()  # at any moment of a later step
    said = process.communicate()[1]
    assert process.returncode == -signal.SIGKILL, said
    status, said = finish(command)
    assert status == 0 and "resuming after step" in said, said
    same_end(whole, get_run_dir(tmp_path), 4)
    assert len(gaps(whole)) == 4 and max(gaps(whole)) < 1e-4


def test_it_learns_as_with_the_local_engine(tmp_path, monkeypatch):
    """The demo's bar in short form, with the filter, the shaping and weights by attention."""
    monkeypatch.setitem(SIZES, "validation", 250)
    reached = {}
    for engine in ("local", "vllm"):
        words = [f"worker.rollout.name={engine}", TOKEN_WEIGHTS, f"training.max_steps={STEPS}", "training.logger=[]"]
        words += [f"training.val_freq={STEPS}", "optimization.compute_attention_metrics=auto"]
        assert cli.main(["train", *words, f"training.output_dir={tmp_path / engine}"]) == 0
        rows = read_metrics(get_run_dir(tmp_path / engine))
        reached[engine] = [rows[step, True]["val/avg@1"] for step in (0, STEPS)]
    (before, local), (same, vllm) = reached["local"], reached["vllm"]
    assert same == before, "greedy answers of both engines are the same at the start"
    assert vllm >= before + 0.15 and abs(vllm - local) < 0.15, reached
    assert max(gaps(get_run_dir(tmp_path / "vllm"))) < 1e-4


def greedy_answers(folder, out, engine, monkeypatch):
    monkeypatch.setitem(SIZES, "validation", 40)
    words = [f"worker.rollout.name={engine}", "worker.actor.fsdp.mixed_precision_dtype=fp32"]
    assert cli.main(["eval", str(folder), "--out", str(out), *words]) == 0
    return [json.loads(line)["response"] for line in out.read_text().splitlines()]


def test_evaluation(tmp_path, monkeypatch):
    """Greedy answers of both engines to pictures are the same."""
    local, vllm = (
        greedy_answers(MODEL_DIRECTORY, tmp_path / f"{engine}.jsonl", engine, monkeypatch)
        for engine in ("local", "vllm")
    )
    assert local == vllm and len(local) == 40


def test_adapters(tmp_path, monkeypatch):
    """Adapters are sampled from while they learn, and the saved result is evaluated as it is."""
    pytest.importorskip("peft")
    words = ["worker.actor.model.peft_type=lora", "worker.actor.optim.lr=1e-2", "worker.actor.optim.warmup_steps=0"]
    assert cli.main(train_arguments(tmp_path, *SETTINGS, *words)) == 0
    assert len(gaps(get_run_dir(tmp_path))) == 4 and max(gaps(get_run_dir(tmp_path))) < 1e-4
    adapters = get_run_dir(tmp_path) / "checkpoints" / "step_4"
    local, vllm, given = (
        greedy_answers(folder, tmp_path / f"{number}.jsonl", engine, monkeypatch)
        for number, (folder, engine) in enumerate([(adapters, "local"), (adapters, "vllm"), (MODEL_DIRECTORY, "local")])
    )
    assert local == vllm != given
