"""`mtrl doctor`: its report on machine and run."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from tiny_models import checkpoint

from mtrl import cli
from mtrl.bench.shapes import write_files
from mtrl.commands import doctor, installed
from mtrl.commands.doctor import GIB
from mtrl.commands.installed import Device, Feature
from mtrl.config import load_config
from mtrl.memory.estimate import MemoryEstimate
from mtrl.memory.fake_model import NotEstimated
from mtrl.memory.plan import Plan, VllmShare
from mtrl.models.families import load_model_config
from mtrl.utils import machine

ROOT = Path(__file__).resolve().parents[2]


# ------------------------------------------------------------------------------------------------------------- machine
def test_the_install_hints_name_extras_that_exist():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for feature in installed.FEATURES:
        if "mtrl[" in feature.install:
            extra = feature.install.partition("[")[2].partition("]")[0]
            packages = {name.replace("-", "_").partition(">")[0].partition("[")[0] for name in extras[extra]}
            packages = {
                name.removesuffix("_skinny") for name in packages
            }  # mlflow's small package brings the module mlflow
            assert set(feature.modules) <= packages, feature.name


def test_a_feature_that_lacks_something():
    feature = Feature("x", ("json", "no_such_module_here"), "pip install x", lambda config: True)
    assert feature.missing() == ["no_such_module_here"]


def test_memory_is_a_plausible_number():
    assert 0 < machine.free_memory() <= machine.cpu_memory()


def test_memory_of_a_container(tmp_path, monkeypatch):
    """A limit of 64 MiB, of which 48 are in use and 16 of these are files in the cache."""
    for name, text in {"limit": 64 << 20, "none": "max", "used": 48 << 20}.items():
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "memory.stat").write_text(f"anon {32 << 20}\ninactive_file {16 << 20}\n")
    containers = tuple((tmp_path / name, "used", "inactive_file") for name in ("none", "limit", "not there"))
    monkeypatch.setattr(machine, "CONTAINERS", containers)
    assert (machine.cpu_memory(), machine.free_memory()) == (64 << 20, 32 << 20)
    (tmp_path / "used").write_text(f"{90 << 20}\n")
    assert machine.free_memory() == 0


def test_the_disk_of_a_directory_that_is_not_there_yet(tmp_path):
    assert machine.existing_parent(tmp_path / "a" / "b") == tmp_path
    assert machine.free_disk(tmp_path / "a" / "b") > 0


# ----------------------------------------------------------------------------------------------------------------- run
def test_the_embedded_task_runs_here(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "transformers" in said and "Optional features" in said and "3.1 million parameters" in said
    assert "It can run here." in said and "PROBLEM" not in said
    assert list(tmp_path.iterdir()) == [], "it changes nothing"


def test_all_problems_are_reported_together(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [
        "dataset.train_files=none.jsonl, org/name@train, zoo@train", "dataset.image_dir=nowhere/",
        "worker.reward.functions=[accuracy, rewards.py:f, no_such_package.module:f, json:loads]",
        "worker.reward.weights=null", "worker.rollout.engine_kwargs.max_num_seqs=8",
        "training.load_checkpoint_path=nothing_to_load",
        "optimization.perturbation=no_such", "training.logger=[console, no]",
    ]  # fmt: skip
    assert cli.main(["doctor", *words[:-1], "worker.actor.model.model_path=./nothing"]) == 2
    problems = [line for line in capsys.readouterr().out.splitlines() if "PROBLEM" in line]
    for message in (
        "worker.rollout.engine_kwargs is not supported",
        "none.jsonl does not exist", "nowhere/ does not exist", "rewards.py does not exist",
        "no module no_such_package.module", "./nothing is no checkpoint directory", "nothing_to_load does not exist",
        "optimization.perturbation: no_such is unknown; use one of ",
    ):  # fmt: skip
        assert sum(message in line for line in problems) == 1, message
    assert len(problems) == 8
    assert cli.main(["doctor", words[-1]]) == 2, "a configuration that does not load"


def test_an_engine_that_cannot_sample_from_the_model(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "estimate", Mock(side_effect=NotEstimated("seconds for recurrent layers")))
    words = ["worker.rollout.name=vllm", "worker.actor.fsdp.mixed_precision_dtype=fp32", "dataset.train_files=no.json"]
    words += [f"worker.actor.model.model_path={checkpoint('qwen3_5')}"]
    said = "worker.rollout.name: on a CPU vLLM computes recurrent layers in bf16 alone; set worker.rollout.name=local"
    assert cli.main(["doctor", *words]) == 2 and f"PROBLEM  {said}" in capsys.readouterr().out
    model, here, gpu = load_model_config(str(checkpoint("qwen3_5"))), installed.devices()[0], doctor.parse_gpu("80")
    server = ["worker.rollout.mode=server", "worker.rollout.address=localhost:1"]
    for device, others in ((gpu, []), (here, ["worker.rollout.name=local"]), (here, server)):
        assert not [*doctor.check_engine(load_config(None, [*words, *others]), model, device)]


def test_a_hub_model_that_is_not_here_is_no_fault(capsys):
    assert (
        cli.main(["doctor", "worker.actor.model.model_path=some-org/some-model", "dataset.train_files=org/data"]) == 0
    )
    said = capsys.readouterr().out
    assert "the memory is not estimated" in said and "the model was not seen" in said and "It can run" not in said


def test_a_wanted_feature_that_is_missing(monkeypatch):
    wanted = Feature("telepathy", ("no_such_module_here",), "pip install telepathy", lambda config: True)
    monkeypatch.setattr(installed, "FEATURES", (wanted,))
    assert list(doctor.find_missing_features(load_config(None, {}))) == [
        "the configuration asks for telepathy: pip install telepathy"
    ]


@pytest.mark.parametrize("command", ["train", "doctor"])
@pytest.mark.parametrize("family", ["t5", "no_such_family"])
def test_an_unknown_family_gets_the_same_line_everywhere(family, command, tmp_path, capsys):
    (tmp_path / "config.json").write_text(f'{{"model_type": "{family}"}}')
    words = [f"worker.actor.model.model_path={tmp_path}", "dataset.train_files=zoo@train"]
    assert cli.main([command, *words, f"training.output_dir={tmp_path}"]) == 2
    said = "".join(capsys.readouterr())
    line = f"{tmp_path} is of the family '{family}'; MTRL knows qwen2_vl, qwen2_5_vl, qwen3_vl, "
    assert said.count(line) == 1 and "docs/extending.md" in said and "Traceback" not in said and "AutoModel" not in said


A_GPU = Device("GPU 0, a card", 40 * GIB, 39 * GIB)
BIG = MemoryEstimate(3_000_000_000, {"weights": 36 * GIB}, {"sample": {}, "update": {"gradients": 9 * GIB}}, "guessed")


def test_advice_if_it_does_not_fit():
    """45 GiB at its fullest, of 40."""
    ways = [("a.b=c", 22 * GIB)]
    (problem,) = doctor.check_memory(BIG, A_GPU, lambda: ways)
    assert "the longest prompts and responses will not fit into 40.00 GiB" in problem and "a.b=c: 22.00 GiB" in problem
    (problem,) = doctor.check_memory(replace(BIG, held={"weights": 41 * GIB}), A_GPU, lambda: ways)
    assert "what is held all the time" in problem
    small = replace(BIG, held={"weights": GIB})
    assert list(doctor.check_memory(small, A_GPU, lambda: pytest.fail("nobody asked"))) == []


def test_the_weights_of_vllm_must_fit_into_its_share():
    """3 billion numbers in bf16 are 5.59 GiB; two devices hold a half each."""
    config = load_config(None, {"worker.rollout.gpu_memory_utilization": 0.1})
    plan = Plan(None, compute="bf16", vllm=VllmShare(4 * GIB))
    (problem,) = doctor.check_vllm_share(config, BIG, plan)
    assert "0.1 of the device is 4.00 GiB, and the weights of vLLM alone take 5.59 GiB; raise it" in problem
    for fits in (VllmShare(6 * GIB), VllmShare(4 * GIB, tp_size=2), None):
        assert list(doctor.check_vllm_share(config, BIG, replace(plan, vllm=fits))) == []


def test_cpu_memory_of_a_machine_with_two_devices():
    config = load_config(None, {"training.n_gpus_per_node": 2, "training.nnodes": 3})
    found = replace(BIG, in_cpu_memory={"weights": GIB, "optimizer state": 2 * GIB})
    assert doctor.cpu_memory_report(config, found, 9 * GIB) == (
        "  CPU memory of a machine, besides programs and data: 9.00 GiB (weights 2.00 GiB, optimizer state 4.00 GiB, "
        "a checkpoint while it is written 3.00 GiB)"
    )


@pytest.mark.slow
def test_advice_comes_with_the_resulting_peak(capsys, monkeypatch):
    """On a device that is too small for the embedded task."""
    monkeypatch.setattr(installed, "devices", lambda: [Device("a small CPU", 80 << 20, 80 << 20)])
    assert cli.main(["doctor", "dataset.max_response_length=200"]) == 2
    said = capsys.readouterr().out
    assert "activations are measured on fake tensors, with all 8 layers; all else is counted" in said
    peak = mib_in(next(line for line in said.splitlines() if "peak: held" in line), "largest phase")
    ways = [line for line in said.splitlines() if line.strip().startswith(("worker.", "dataset.", "optimization."))]
    peaks = [mib_in(line, ":") for line in ways]
    assert ways and peaks == sorted(peaks) and peaks[-1] < peak
    assert any("dataset.max_response_length=100" in way for way in ways)


def test_a_gpu_that_is_not_here(capsys, fake_passes):
    assert cli.main(["doctor", "--gpu", "80", "worker.actor.model.enable_gradient_checkpointing=auto"]) == 0
    said = capsys.readouterr().out
    assert "    with all layers checkpointed; auto lets as many as fit keep their activations\n" in said
    assert "of 80.00 GiB (a GPU of 80 GiB)" in said and "workspaces of cuBLAS" in said and "It can run there" in said
    assert cli.main(["doctor", "--gpu", "large"]) == 2
    assert "--gpu: large is no number of GiB" in capsys.readouterr().err


@pytest.mark.slow
def test_the_quick_start_for_eight_cards(tmp_path, capsys, monkeypatch):
    """A shape without weights and without the data: everything else is told."""
    write_files(tmp_path / "model", "7b")
    words = [f"worker.actor.model.model_path={tmp_path / 'model'}", "--gpu", "80"]
    assert cli.main(["doctor", str(ROOT / "tests/data/quickstart.yaml"), *words]) == 2
    said = capsys.readouterr().out
    (peak,) = (line for line in said.splitlines() if "peak: held" in line)
    assert "8,294.7 million parameters; memory of each device" in said
    assert "vLLM: weights, keys and values          32.00 GiB" in said
    assert 32 < float(peak.split("largest phase")[1].split()[0]) < 80
    assert "weights of vLLM, asleep 123.60 GiB" in said, "eight copies in bf16"
    assert "not supported" not in said


def mib_in(line: str, after: str) -> float:
    number, unit = line.rpartition(after)[2].split()[:2]
    return float(number) * {"GiB": 1024, "MiB": 1}[unit]


def test_checkpoints_must_fit_on_the_disk(tmp_path, monkeypatch, capsys):
    config = load_config(None, {"training.output_dir": str(tmp_path / "runs"), "training.save_limit": 3})
    monkeypatch.setattr(doctor, "free_disk", lambda path: 100 * GIB)
    (problem,) = doctor.check_disk(config, BIG.parameters)  # three stored, the best, one being written: 33.53 GiB each
    assert "5 checkpoints need 167.64 GiB" in problem
    monkeypatch.setattr(doctor, "free_disk", lambda path: 200 * GIB)
    assert list(doctor.check_disk(config, BIG.parameters)) == []


@pytest.mark.slow
def test_no_network_is_used(tmp_path):
    """The command sets the hub offline before anything is imported."""
    code = "import sys; from mtrl import cli; rc = cli.main(['doctor', 'worker.actor.model.model_path=org/none']); "
    code += "import huggingface_hub.constants as c; print(c.HF_HUB_OFFLINE); sys.exit(rc)"
    clean = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=tmp_path, env=clean
    )
    assert done.stdout.splitlines()[-1] == "True", done.stderr
