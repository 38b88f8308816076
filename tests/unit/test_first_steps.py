"""`benchmarks.first_steps` and `benchmarks.steps_beside`: what a step made for the first time, and what slows it."""

import pytest
import torch

from benchmarks import first_steps, steps_beside

SMALL = ["--prompts=2", "--generations=2", "--completion=5", "--text-tokens=40", "--steps=2"]
COMPUTE = "worker.actor.fsdp.mixed_precision_dtype=fp32"  # processors without bf16 take half a minute for it


def test_a_compilation_is_reported_once_with_its_reason():
    double = torch.compile(lambda x: 2 * x, backend="eager")
    with first_steps.watch_compilers() as first_times:
        first_times.take()
        double(torch.ones(3))
        (first,) = first_times.take()["compiled"]
        double(torch.ones(3, dtype=torch.float64))
        (second,) = first_times.take()["compiled"]
        assert first_times.take()["compiled"] == []
    assert "again" not in first and "test_first_steps.py" in first
    assert "again: " in second and "dtype mismatch" in second


@pytest.mark.slow
def test_steps_have_prompts_of_every_size():
    found = first_steps.run(first_steps.parse([*SMALL, "--sides", "56", "112", "--", COMPUTE]))
    assert [row["step"] for row in found["steps"]] == [0, 1, 2]
    assert found["settings"]["dataset.min_pixels"] == 56**2
    assert all(row["wall"] > 0 and row["captures"] == 0 for row in found["steps"])


@pytest.mark.slow
def test_every_work_has_steps_next_to_it():
    found = steps_beside.run(steps_beside.parse([*SMALL, "--", COMPUTE]))["beside"]
    assert [*found] == [*steps_beside.WORKS, "nothing, again"]
    assert found["nothing"]["in_proportion"] == 1
    assert all(row["wall"] > 0 for row in found.values())
