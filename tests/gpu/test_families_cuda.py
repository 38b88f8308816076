"""The checks of model families on a GPU, and the compiled recurrence of Qwen3.5. Skipped without a GPU."""

import pytest
import torch

from benchmarks.delta_rule import draw, measure, relative_errors
from benchmarks.measure import compiled_graphs
from mtrl.compose.family_checks import run_checks
from mtrl.models.delta_rule import find_chunk_dims, gated_delta_rule, solve_chunks
from mtrl.models.patches import compile_function
from pretraining.tiny_checkpoints import make_tiny_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "gemma3", "gemma3_text", "glm4v", "glm4v_moe"]
)
def test_every_check_passes(family, tmp_path, exact_products):
    path = make_tiny_checkpoint(tmp_path / family, family, layers=4)
    findings = list(run_checks(str(path), device="cuda"))
    assert findings and all(finding.passed for finding in findings), findings


def test_the_compiled_recurrence_equals_the_plain_one(exact_products):
    """Also for other numbers of rows and chunks, without another compilation."""
    solve = compile_function(solve_chunks, find_chunk_dims)
    graphs = []
    for rows, length in ((3, 200), (1, 64), (5, 130)):
        inputs = draw(rows, length, "cuda", torch.float32)
        expected = measure(gated_delta_rule, inputs)
        found = measure(lambda *given, **named: gated_delta_rule(*given, solve=solve, **named), inputs)
        assert max(relative_errors(found, expected).values()) < 1e-5
        graphs.append(compiled_graphs())
    assert graphs[2] == graphs[1]  # a single chunk may have one of its own
