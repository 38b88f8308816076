"""A second run compiles nothing again. Skipped without a GPU."""

import os
import subprocess
import sys
import time

import pytest
import torch

from mtrl.models.compile_cache import INDUCTOR, TRITON

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_a_second_run_uses_the_compile_cache_of_the_first(tmp_path, capsys):
    kept = tmp_path / "cache" / "compiled"
    environment = {name: value for name, value in os.environ.items() if name not in (INDUCTOR, TRITON)}
    environment |= {"MTRL_CACHE": str(tmp_path / "cache")}
    environment |= {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}  # it runs in another folder
    graphs, seconds = [], []
    for name in ("first", "second"):
        words = ["training.max_steps=1", "training.val_before_train=false", f"training.experiment_name={name}"]
        begin = time.perf_counter()
        run = subprocess.run(
            [sys.executable, "-m", "mtrl", "train", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        seconds.append(time.perf_counter() - begin)
        assert run.returncode == 0, run.stderr
        assert run.stderr.count(f"cached in {kept}") == 1, "reported once"
        graphs.append({path.name for path in kept.glob("fxgraph/*/*")})
    with capsys.disabled():
        print(f"\nfirst run {seconds[0]:.0f} s, second {seconds[1]:.0f} s, {len(graphs[0])} graphs kept")
    assert graphs[0] and graphs[1] == graphs[0]
