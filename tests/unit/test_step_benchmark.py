"""`benchmarks.step` measures the run of `mtrl train`: only its reported settings differ from a user's run."""

import json

import pytest

from benchmarks import step
from mtrl.bench import measure
from mtrl.bench.random_run import PATHS
from mtrl.bench.shapes import write_files
from mtrl.bench.table import make_phases
from mtrl.compose.run import run_directory
from mtrl.config import load_config
from mtrl.config.load_config import to_dict
from mtrl.models.random_model import draw_model

SMALL = ["--prompts=2", "--generations=2", "--completion=5", "--steps=3", "--text-tokens=40"]
COMPUTE = "worker.actor.fsdp.mixed_precision_dtype"  # processors without bf16 take half a minute for it
SIZES = {
    "dataset.rollout_batch_size": 2,
    "dataset.max_response_length": 5,
    "dataset.min_pixels": 56**2,
    "training.max_steps": 3,
    "worker.actor.global_batch_size": 2,
    "worker.rollout.n": 2,
    "worker.reward.functions": ["rewards.py:score"],
}


@pytest.fixture
def built(monkeypatch):
    """The runs that the benchmark builds."""
    runs, build = [], measure.build
    monkeypatch.setattr(measure, "build", lambda *args, **rest: runs.append(build(*args, **rest)) or runs[-1])
    return runs


def leaves(tree, prefix=""):
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def changed(config):
    """Keys of a configuration that are not as a user gets them, without the paths."""
    defaults = dict(leaves(to_dict(load_config())))
    given = {key: value for key, value in leaves(to_dict(config)) if value != defaults[key]}
    return {key: value for key, value in given.items() if key not in PATHS}


def test_it_differs_from_the_defaults_only_in_its_reported_settings(built, capsys):
    result = step.run(step.parse([*SMALL, f"{COMPUTE}=fp32"]))
    (run,) = built
    assert result["settings"] == SIZES | {COMPUTE: "fp32"}
    assert changed(run.config).keys() == {*SIZES, COMPUTE}
    assert result["args"]["dtype"] == "fp32" == run.config.worker.actor.fsdp.param_dtype
    assert not run_directory(run.config).exists(), "nothing is left behind"

    rows, median = result["steps"], result["median_of_measured_steps"]
    assert [row["completion_tokens"] for row in rows] == [2 * 2 * 5] * 3, "no response ends early"
    assert result["prompt_len"] == 40 + (56 // 28) ** 2 and result["image_tokens"] == 4
    assert all(row["grad_norm"] > 0 for row in rows), "rewards differ within a group"
    assert median["wall"] == pytest.approx((rows[1]["wall"] + rows[2]["wall"]) / 2, abs=1e-4), "without the warm-up"
    assert json.loads(json.dumps(result))["saving"] is None


def test_arguments_become_keys(built, capsys):
    words = [*SMALL, "--steps=1", "--tprl", "--attention", "--save"]
    result = step.run(step.parse([*words, "optimization.disable_divergence=true", f"{COMPUTE}=fp32"]))
    (run,) = built
    added = {
        "optimization.compute_attention_metrics": True,
        "optimization.enable_perception_filtering": True,
        "optimization.enable_trajectory_reweighting": True,
        "optimization.disable_divergence": True,
        COMPUTE: "fp32",
    }
    assert result["settings"] == SIZES | {"training.max_steps": 1} | added
    assert changed(run.config).keys() == result["settings"].keys()
    assert run.loop.spec.divergence is None and len(run.loop.spec.credit) == 2
    assert {
        "dependency",
        "old_logprobs",
    } <= run.loop.spec.needs.names and run.loop.spec.attention_every == 1
    assert 0 < result["saving"]["held"] <= result["saving"]["written"]
    parameters = list(run.loop.components.actor.model.parameters())
    assert result["saving"]["gb"] > 3 * sum(p.nbytes for p in parameters) / 2**30, "weights and two averages"


def test_a_step_without_a_probe(capsys):
    """Plain GRPO: one optimizer step on fresh responses needs nothing that a probe measures."""
    words = [*SMALL, "--steps=1", "optimization.disable_divergence=true", f"{COMPUTE}=fp32"]
    result = step.run(step.parse(words))
    (row,) = result["steps"]
    assert row["detail"]["probe"] == row["peak_gb_probe"] == 0 and row["training"] > 0 and row["grad_norm"] > 0
    (probe,) = (phase for phase in make_phases(result) if phase.name == "probe")
    assert probe.cells(row["wall"])[3:] == ["-"] * 5, "no tokens, no MFU, no peak"


def test_adapters_on_a_base_without_files(built, capsys):
    pytest.importorskip("peft")
    words = [*SMALL, "--steps=1", "worker.actor.model.peft_type=lora", f"{COMPUTE}=fp32", "--save"]
    result = step.run(step.parse(words))
    (run,) = built
    learning = [name for name, p in run.loop.components.actor.model.named_parameters() if p.requires_grad]
    assert learning and all(".lora_" in name for name in learning)
    assert result["steps"][0]["grad_norm"] > 0 and result["halved"] is None and result["peak_gb_buffers"] == 0
    assert result["settings"]["worker.actor.model.peft_type"] == "lora"


def test_the_shape_of_seven_billion(tmp_path):
    """8,292,166,656 parameters, as the published model has by its own index of weights."""
    model = draw_model(write_files(tmp_path, "7b"), "meta", "bf16", 0)
    assert sum(p.numel() for p in model.parameters()) == 8_292_166_656
    assert model.lm_head.weight is not model.get_input_embeddings().weight
    assert not list(tmp_path.glob("*.safetensors"))


def test_the_dtype_of_the_weights():
    plain, narrow = (
        step.make_workload(step.parse([*SMALL, *words])).make_settings() for words in ([], ["--dtype=bf16"])
    )
    assert plain == SIZES and narrow == SIZES | {"worker.actor.fsdp.param_dtype": "bf16"}
