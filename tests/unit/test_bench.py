"""`mtrl bench`: its table and JSON, the arithmetic of MFU, the sizes it chooses, and its errors."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from mtrl.bench import measure
from mtrl.bench.peak_flops import find_peak, measure_mfu
from mtrl.bench.random_run import encode_question, random_questions
from mtrl.bench.shapes import SHAPES, write_files
from mtrl.bench.table import make_report
from mtrl.bench.workload import Workload, count_tokens
from mtrl.cli import main
from mtrl.commands.bench import OPTIONS, make_workload
from mtrl.models.families import find_family, load_encoder
from mtrl.models.random_model import draw_model
from mtrl.types import VISION_POOL

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
QWEN3_5 = json.loads((RESULTS / "step_qwen3_5.json").read_text())["qwen3.5-4b"]


def test_a_measurement_on_a_cpu(tmp_path, capsys):
    sizes = ["--prompts=2", "--responses=3", "--response-tokens=4", "--image-tokens=5", "--text-tokens=40", "--steps=2"]
    out = tmp_path / "result.json"
    assert main(["bench", *sizes, "--tprl", "--attention", "--out", str(out), "worker.actor.optim.lr=1e-5"]) == 0
    printed, progress = capsys.readouterr()
    result = json.loads(out.read_text())
    assert result["args"]["size"] == "tiny" and result["prompt_len"] == 9 + 40 and result["image_tokens"] == 9
    assert [row["completion_tokens"] for row in result["steps"]] == [2 * 3 * 4] * 2
    assert all(row["grad_norm"] > 0 for row in result["steps"])
    assert result["settings"]["optimization.enable_perception_filtering"] is True
    assert result["versions"]["torch"] and result["hardware"]["cores"]

    median = result["median_of_measured_steps"]
    assert median["wall"] == pytest.approx(result["steps"][1]["wall"], abs=1e-4), "without the warm-up"
    rows = {line.split()[0]: line.split()[1:] for line in printed.split("\n\n")[1].splitlines()}
    assert rows["phase"] == ["seconds", "share", "tokens/s", "MFU", "tokens/s*", "MFU*", "peak", "GiB"]
    seconds = {name: float(rows[name][0]) for name in ("generation", "probe", "update", "other", "step")}
    assert seconds["step"] == pytest.approx(sum(seconds.values()) - seconds["step"], abs=0.003)
    assert seconds["update"] == pytest.approx(median["training"], abs=1e-3)
    once, per_response = (float(rows["update"][column].replace(",", "")) for column in (2, 4))
    assert per_response == pytest.approx(median["train_tokens_per_s"], abs=1)
    assert per_response / once == pytest.approx(6 * (49 + 4) / (2 * 49 + 6 * 4), rel=0.05)
    assert "2 prompts x 3 responses x 4 tokens; a prompt has 9 image tokens and 40 others" in printed
    assert "worker.actor.optim.lr=1e-05" in printed and "MFU       not defined on a CPU" in printed
    assert "--image-tokens 5: pictures are squares, so that they have 9 tokens" in progress
    assert "step 2 of 2: " in progress and "step 2/2" not in progress, "the console of a run is off"


# ----------------------------------------------------------------------------------------------------------------- MFU
def test_the_arithmetic_is_that_of_a_recorded_result():
    """Recorded on an H200: 4,205.8 million parameters without the vision tower, 3.4453 s, 8 x 8 responses."""
    median = QWEN3_5["median_of_measured_steps"]
    parameters = round((QWEN3_5["params_m"] - QWEN3_5["vision_params_m"]) * 1e6)
    once, per_response = count_tokens(8, 8, 642, 256)
    assert (once, per_response) == (8 * 642 + 64 * 256, 64 * (642 + 256))
    found = [measure_mfu(parameters, tokens, median["training"], 989e12) for tokens in (once, per_response)]
    assert found == [median["mfu_training_prompts_once"], median["mfu_training_prompts_per_response"]]


class Model(torch.nn.Module):
    """Ten weights, and a vision tower that does not count."""

    def __init__(self):
        super().__init__()
        self.language = torch.nn.Linear(10, 1, bias=False)
        self.model = torch.nn.ModuleDict({"visual": torch.nn.Linear(9, 9)})
        self.config = AutoConfig.for_model("qwen2_5_vl")


@pytest.mark.parametrize(("device", "gpu"), [("cpu", "NVIDIA H200"), ("cuda", "NVIDIA H200"), ("cuda", "Other GPU")])
def test_there_is_no_mfu_without_a_known_peak(device, gpu, monkeypatch):
    monkeypatch.setattr(measure, "hardware", lambda: {"gpu": gpu})
    found = measure.measure_training_mfu(Workload(device=device), Model(), 60, 1e-12)
    # 2 prompts x 60 and 8 responses x 16 tokens are 248, or 608 with a prompt for each response
    expected = [round(6 * 10 * tokens / 1e-12 / 989e12, 4) for tokens in (248, 608)]
    assert [*found.values()] == (expected if (device, gpu) == ("cuda", "NVIDIA H200") else [])


def test_there_is_no_mfu_if_weights_are_frozen(monkeypatch):
    monkeypatch.setattr(measure, "hardware", lambda: {"gpu": "NVIDIA H200"})
    model = Model()
    model.language.requires_grad_(False)
    assert measure.measure_training_mfu(Workload(device="cuda"), model, 60, 1.0) == {}


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA B200", 2250),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA A10G", None),
        (None, None),
    ],
)
def test_the_peak_of_a_card(name, tera):
    assert find_peak(name) == (None if tera is None else tera * 1e12)


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ("NVIDIA H200", ["15.9%", "42.6%", "989 TFLOP/s in bf16 for a NVIDIA H200"]),
        ("Other GPU", ["MFU       left out, since the peak of a Other GPU is not known"]),
    ],
)
def test_the_table_of_a_gpu(gpu, words):
    result = QWEN3_5 | {"hardware": {"gpu": gpu}, "peak_gb_probe": 40.0, "peak_gb_update": 52.1}
    report = make_report(result)
    assert all(word in report for word in words)
    assert "weights in bf16, products in bf16" in report and "73.4 s of preflight" in report
    (update,) = [line.split() for line in report.splitlines() if line.startswith("update  ")]
    assert update[1:4] == ["3.445", "16.4%", "6,246"] and update[5] == "16,681" and update[7] == "52.1"


# --------------------------------------------------------------------------------------------------------------- sizes
@pytest.mark.parametrize(
    ("size", "asked", "side"), [("3b", 576, 672), ("3b", 577, 700), ("qwen3.5-4b", 576, 768), ("tiny", 1, 28)]
)
def test_a_picture_is_the_next_square(size, asked, side):
    assert SHAPES[size].image_side(asked) == side
    assert SHAPES[size].image_tokens(side) >= asked > SHAPES[size].image_tokens(side - SHAPES[size].token_pixels)


@pytest.mark.parametrize(("size", "side"), [("gemma3-4b", 896), ("internvl-2b", 448)])
def test_pictures_of_a_tower_that_reads_one_size(size, side, tmp_path):
    """Files as of a published checkpoint; a prompt has as many tokens as the shape says."""
    shape, encoder = SHAPES[size], load_encoder(write_files(tmp_path, size))
    assert shape.image_side(1) == shape.image_side(576) == side and shape.image_tokens(side) == 256
    for text, image in random_questions(encoder, 3, [side], 66):
        prompt = encode_question(encoder, 0, text, image)
        assert len(prompt.ids) == 256 + 66 and int((prompt.token_pool == VISION_POOL).sum()) == 256
    model = draw_model(tmp_path, "meta", "bf16", 0)
    vision = sum(weight.numel() for name, weight in model.named_parameters() if measure.find_vision(model)(name))
    language = find_family(model.config).find_language_model(model)
    assert vision + sum(weight.numel() for weight in language.parameters()) == sum(
        weight.numel() for weight in model.parameters()
    )


@pytest.mark.parametrize(
    ("gib", "shape", "dtype"),
    [(139.8, "3b", "fp32"), (79.1, "3b", "fp32"), (44.5, "3b", "bf16"), (23.6, "tiny", "fp32")],
)
def test_a_gpu_gets_the_shape_that_fits(gib, shape, dtype, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, gib * 2**30))
    workload = make_workload(OPTIONS.parse_args([]), [])
    assert (workload.size, workload.dtype, workload.device) == (shape, dtype, "cuda")
    assert ("peft_type=lora" in capsys.readouterr().err) == (shape == "tiny")
    sizes = (workload.prompts, workload.generations, workload.completion, workload.image_tokens, workload.text_tokens)
    assert sizes == ((2, 4, 16, 4, 64) if shape == "tiny" else (8, 8, 256, 576, 66))
    chosen = make_workload(OPTIONS.parse_args(["--shape=7b", "--dtype=bf16", "--prompts=32"]), [])
    assert (chosen.size, chosen.dtype, chosen.prompts, chosen.image_side) == ("7b", "bf16", 32, 672)
    assert not capsys.readouterr().err, "a shape that was asked for is not discussed"


# -------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--shape", "9b"], "--shape: invalid choice: '9b'"),
        (["--steps", "1"], "--steps: 1 is no whole number of at least 2"),
        (["--image-tokens", "0"], "--image-tokens: 0 is no whole number of at least 1"),
        (["--response-tokens", "128000"], "a prompt and its response have 128,068 tokens"),
        (["run.yaml"], "run.yaml: it takes no file"),
        (["worker.rollout.n=4"], "worker.rollout.n: use --responses"),
        (["dataset.max_pixels=4096"], "dataset.max_pixels: use --image-tokens"),
        (["worker.actor.model.model_path=zoo"], "the model is made here, use --shape"),
        (["training.n_gpus_per_node=2"], "mtrl bench measures one process on one device"),
        (["worker.rollout.name=vllm"], "mtrl bench measures the local engine"),
        (["worker.actor.optim.lr=fast"], "worker.actor.optim.lr"),
        (["--out", "no/folder/result.json"], "--out: no/folder is no directory"),
    ],
)
def test_bad_values_are_named(words, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *words]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("mtrl: ") and named in printed.err and not printed.out
