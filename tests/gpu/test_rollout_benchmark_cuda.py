"""`benchmarks.rollout` on a GPU, with the tiny model: its report of memory and kernels. Skipped without a GPU."""

import pytest
import torch

from benchmarks import rollout
from benchmarks.rollout_rounds import PHASES, measure_rounds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,  # passes are compiled
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_cases_report_memory_floor_and_kernels(tmp_path):
    file = tmp_path / "profile.txt"
    words = ["--device=cuda", "--rounds=1", f"--profile={file}", "--only", "4x6", "8x12-drawn", "8x12-drawn-all-stay"]
    for found in rollout.run(rollout.parse(words))["cases"].values():
        memory = found["memory"]
        assert memory["peak_gb"] >= memory["before"]["allocated_gb"] > 0 and found["floor_ms_a_step"] >= 0
        assert memory["awake"]["device_used_gb"] >= memory["awake"]["allocated_gb"]
    head, _, *kernels = file.read_text().splitlines()
    assert torch.cuda.get_device_name() in head and len(kernels) > 5


def test_rounds_report_peaks_and_growth():
    a = rollout.parse(["--device=cuda", "--memory=4"])
    summary = measure_rounds(a, rollout.precision(a))["summary"]
    assert summary["peak_gb_step"] == max(summary[f"peak_gb_{phase}"] for phase in PHASES)
    assert summary["peak_gb_update_without_engine"] > 0 and summary["step_over_its_parts"] > 0
    assert summary["device_used_gb_at_most"] >= summary["peak_gb_step"] * 0.99
