"""`benchmarks.rollout` measures the engine that `mtrl train` builds, on the work of its cases."""

import copy
import json
from dataclasses import replace

import pytest
import torch
import torch_ops as plain
from tiny_models import fresh_backbone, get_encoder, prompts_for

from benchmarks import rollout
from benchmarks.drawn_lengths import draw_lengths, drawn_lengths
from benchmarks.rollout_rounds import SIZES, measure_rounds, summarize
from mtrl.rollout.decode.engine import GraphGenerator
from mtrl.rollout.decode.step import Ops
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Sampling

FAMILY = "qwen2_5_vl"
TEMPERATURE = "worker.rollout.temperature=0.9"
COMPUTE = "worker.actor.fsdp.mixed_precision_dtype"
SAMPLING = Sampling(n=3, max_new_tokens=9)


def engines(encoder):
    backbone = fresh_backbone(FAMILY)
    graphs = GraphGenerator(backbone, encoder, ops=Ops(plain, plain), buckets=(16, 32), poll=1)
    return {"plain": LocalGenerator(backbone, encoder), "graphs": graphs}


@pytest.mark.parametrize("name", ["plain", "graphs"])
def test_responses_have_the_lengths_that_are_drawn(name):
    encoder, prompts = copy.copy(get_encoder(FAMILY)), prompts_for(FAMILY)
    before, drawn = encoder.stop_ids, []
    for step in (0, 1):
        sampling = replace(SAMPLING, step=step)
        with drawn_lengths(encoder, shortest=2):
            found = engines(encoder)[name].generate(prompts, sampling)
        drawn.append(draw_lengths(len(found), sampling, shortest=2))
        assert torch.equal(found.mask.sum(1), drawn[-1])
        assert set(found.finish_reason) == {"stop"}
    assert not torch.equal(*drawn), "others at every step"
    assert encoder.stop_ids == before


def test_drawn_lengths_are_uniform_within_their_limits():
    lengths = draw_lengths(20_000, Sampling(max_new_tokens=256), shortest=32)
    assert (int(lengths.min()), int(lengths.max())) == (32, 256) and abs(float(lengths.double().mean()) - 144) < 2
    longest = {int(draw_lengths(500, Sampling(max_new_tokens=256, step=k), 32, varying=True).max()) for k in range(8)}
    assert len(longest) > 4 and min(longest) >= 32 and max(longest) <= 256
    assert draw_lengths(3, Sampling(max_new_tokens=1), shortest=32).tolist() == [1, 1, 1]


@pytest.fixture
def configurations(monkeypatch):
    """Those that engines are built from."""
    seen, build = [], rollout.build_generator
    monkeypatch.setattr(rollout, "build_generator", lambda config, *rest: seen.append(config) or build(config, *rest))
    return seen


@pytest.mark.slow
def test_cases_are_measured_with_peers_and_a_profile(configurations, tmp_path, capsys):
    file = tmp_path / "profile.txt"
    names = ["4x6", "8x12-drawn", "8x12-drawn-all-stay"]
    result = rollout.run(rollout.parse([TEMPERATURE, "--rounds=2", f"--profile={file}", "--only", *names]))
    cases, printed_lines = result["cases"], capsys.readouterr().out.splitlines()
    assert [*cases] == names and json.loads(json.dumps(result)) == result
    for name, found in cases.items():
        case = rollout.CASES["tiny"][name]
        assert found["rows"] == case.prompts * case.n and len(found["seconds_of_rounds"]) == 2
        assert found["tokens"] <= found["rows"] * case.new and found["seconds"] >= found["first_token_s"] > 0
        assert (found["tokens"] == found["rows"] * case.new) == (case.shortest is None)
        assert found["engine"] == "LocalGenerator" and not found["captures"] and found["floor_ms_a_step"] is None
    assert [line.split(":")[0] for line in printed_lines] == [*cases], "a line each"
    sizes = [(c.dataset.rollout_batch_size, c.worker.rollout.n, c.max_new_tokens) for c in configurations]
    assert sizes == [(2, 2, 6), (2, 4, 12), (2, 4, 12), (2, 2, 6)], "as runs of these sizes have it, the profile last"
    assert {c.worker.rollout.temperature for c in configurations} == {0.9}
    assert result["settings"] == {COMPUTE: "fp32", "worker.rollout.temperature": 0.9}, "all else is as users get it"
    drawn, stayed = cases["8x12-drawn"], cases["8x12-drawn-all-stay"]
    assert drawn["tokens"] == stayed["tokens"], "the same lengths with compaction and without"
    peers = cases["4x6"]["peers"]
    assert peers["model_generate_over_ours"] > 0
    lines = file.read_text().splitlines()
    assert "4x6, 5 steps" in lines[0] and any("aten::" in line for line in lines[2:])
    times = [float(line.split()[0]) for line in lines[2:]]
    assert times == sorted(times, reverse=True) and times[0] > 0


def test_the_dtype_of_the_weights_is_the_default_unless_requested():
    assert rollout.precision(rollout.parse(["--device=cuda"])) == {}
    narrow = rollout.precision(rollout.parse(["--device=cuda", "--dtype=bf16"]))
    assert narrow == {"worker.actor.fsdp.param_dtype": "bf16"}
    assert rollout.precision(rollout.parse([])) == {COMPUTE: "fp32"}


def test_an_unknown_case_is_an_error(capsys):
    with pytest.raises(SystemExit):
        rollout.parse(["--size=3b", "--only", "64x256", "64x25"])
    assert "no case 64x25; choose from 64x256, " in capsys.readouterr().err


def test_the_floor_counts_weights_and_each_prompt_once_a_group():
    """Two prompts, lengths 3 and 2, 4 and 1: the second row of the last group never reads its prompt again."""
    backbone, prompts = fresh_backbone(FAMILY), prompts_for(FAMILY)[:2]
    lengths = torch.tensor([3, 2, 4, 1])
    mask = torch.arange(4) < lengths[:, None]
    found = LocalGenerator(backbone, get_encoder(FAMILY)).generate(prompts, Sampling(n=2, max_new_tokens=4))
    rollouts = replace(found, mask=mask)
    text = backbone.language_model.config
    token = 2 * text.num_hidden_layers * text.num_key_value_heads * (text.hidden_size // text.num_attention_heads)
    own = (1 + 2) + 1 + (1 + 2 + 3) + 0
    shared = 2 * len(prompts[0].ids) + 3 * len(prompts[1].ids)
    matrices = {id(p): p.numel() for p in [*backbone.language_model.parameters(), backbone.output_matrix]}
    if backbone.output_matrix is not backbone.language_model.get_input_embeddings().weight:
        matrices.pop(id(backbone.language_model.get_input_embeddings().weight))
    assert rollout.bytes_to_read(backbone, rollouts) == 4 * (3 * sum(matrices.values()) + token * (own + shared))


@pytest.mark.slow
def test_rounds_of_a_run_change_lengths_and_images(capsys):
    result = measure_rounds(rollout.parse(["--memory=2"]), rollout.precision(rollout.parse([])))
    rows, sizes = result["rounds"], SIZES["tiny"]
    assert [row["round"] for row in rows] == [1, 2]
    assert len({row["prompt_tokens"] for row in rows}) > 1 and len({row["longest_response"] for row in rows}) > 1
    assert max(row["longest_prompt"] for row in rows) == sizes.text_tokens + (max(sizes.sides) // 28) ** 2
    assert all(row["seconds_update"] > 0 for row in rows) and result["settings"]["worker.rollout.n"] == sizes.n
    assert result["summary"] == {"captures_after_round_3": 0, "compiled_graphs_after_round_3": 0}
    json.dumps(result)


def test_growth_after_the_third_round_is_reported(monkeypatch):
    """As on a GPU: a graph in round four, and tensors that stay."""
    held = [{"allocated_gb": 10.0 + k / 8, "device_used_gb": 20.0} for k in range(5)]
    monkeypatch.setattr("benchmarks.rollout_rounds.held_gb", lambda: held[0])
    peaks = {"peak_gb_generate": 12.0, "peak_gb_probe": 11.0, "peak_gb_update": 15.0}
    rows = [
        {"captures": captures, "compiled_graphs": 7, "awake": {"device_used_gb": 21.0}, **peaks, **each}
        for captures, each in zip((1, 2, 2, 3, 3), held, strict=True)
    ]
    assert summarize(rows) == {
        "captures_after_round_3": 1, "compiled_graphs_after_round_3": 0, "allocated_gb_growth_after_round_3": 0.25,
        "device_used_gb_growth_after_round_3": 0.0, **peaks, "peak_gb_step": 15.0, "device_used_gb_at_most": 21.0,
    }  # fmt: skip
