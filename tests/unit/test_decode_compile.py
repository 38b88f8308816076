"""The kernels of decoding are compiled for a GPU: Triton's interpreter, which other tests use, accepts more than its
compiler does."""

import ast
import json
import os
import subprocess
import sys

import pytest
from sources import ROOT, SOURCES, nodes

pytest.importorskip("triton")
# With all kinds of layers between them.
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3_text", "qwen3_5_moe", "glm4v", "glm4v_moe")


def kernels():
    """Names of all functions called `.._kernel` in the room."""
    modules = [name for name in SOURCES if name.startswith("mtrl.rollout.decode.")]
    functions = [node for module in modules for node in nodes(module) if isinstance(node, ast.FunctionDef)]
    return {each.name for each in functions if each.name.endswith("_kernel")}


def test_every_kernel_compiles_for_sm_90(tmp_path):
    folders = [ROOT / each for each in ("", "tests", "tests/unit", "embedded")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, folders)), "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "tests/compile_kernels.py"), *FAMILIES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = json.loads(done.stdout.splitlines()[-1])
    assert compiled.keys() == kernels() and min(compiled.values()) > 0
