"""Several ranks that share one GPU train as one process does: whole runs of `mtrl train`, started by torchrun.

    python -m pytest tests/gpu/test_ranks_on_one_gpu.py -m slow

This proves the logic of ranks on CUDA: FSDP2, sequence parallelism, adapters, a critic, offloading, compiled passes,
decoding by graphs, checkpoints resumed by another number of ranks. Their collectives are gloo's, so it says nothing
about NCCL, nor about speed. Skipped without a GPU.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from run_helpers import ADAPTERS, get_run_dir, read_metrics, train_arguments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,  # half a minute a run
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

STEPS, SECONDS = 3, 500
SETTINGS = (
    "dataset.rollout_batch_size=8", "worker.actor.global_batch_size=4", "training.val_freq=-1",
    "training.val_before_train=false", "training.save_freq=-1", "optimization.enable_perception_filtering=true",
    "optimization.enable_trajectory_reweighting=true", "optimization.compute_attention_metrics=true",
    "optimization.disable_divergence=false", "worker.actor.optim.warmup_steps=0",
    "worker.actor.fsdp.mixed_precision_dtype=fp32",
)  # fmt: skip
CRITIC = ("optimization.advantage_estimator=gae", "worker.critic.optim.lr=1e-4")
OFFLOAD = ("worker.actor.offload.offload_optimizer=true", "worker.ref.offload_params=true")
# Settings of one process and of the ranks; settings of the ranks alone; ranks.
RUNS = {
    "two ranks": ((), (), 2),
    "four ranks": ((), (), 4),
    "sequence parallel": ((), ("worker.actor.ulysses_size=2",), 2),
    "two by two": ((), ("worker.actor.ulysses_size=2",), 4),
    "adapters": (ADAPTERS, (), 2),
    "critic": (CRITIC, (), 2),
    "offloaded": ((), OFFLOAD, 2),
    "weights in CPU memory": ((), ("worker.actor.fsdp.cpu_offload=true",), 2),
}
COMPARED = ("reward/", "actor/", "critic/", "response_length/", "advantage/", "attention/", "rollout/")
AT_LEAST = 40  # metrics


def train(output, *words, ranks=None, steps=STEPS):
    """The metrics of a run in one process, or on ranks."""
    words = (*SETTINGS, f"training.max_steps={steps}", *words)
    launcher = [sys.executable, "-m"]
    if ranks is not None:
        words = (*words, f"training.n_gpus_per_node={ranks}")
        launcher += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": search_path()}
    arguments = [*launcher, "mtrl", *train_arguments(output, *words)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return read_metrics(get_run_dir(output))


def search_path():
    return os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The metrics of one process by its settings."""
    return cache(lambda words: train(tmp_path_factory.mktemp("alone"), *words))


def check_same(found, expected):
    assert found.keys() >= expected.keys() and len(expected) > STEPS  # and a validation at the end of each run
    for place, row in expected.items():
        if place[1]:
            assert found[place] == pytest.approx(row, rel=1e-3, abs=1e-4)
            continue
        compared = [name for name in row if name.startswith(COMPARED) and "logprob_gap" not in name]
        assert len(compared) >= AT_LEAST, compared
        for name in compared:
            assert found[place][name] == pytest.approx(row[name], rel=1e-3, abs=1e-4), (place, name)


@pytest.mark.parametrize("name", RUNS)
def test_ranks_train_as_one_process(name, tmp_path, alone):
    words, more, ranks = RUNS[name]
    check_same(train(tmp_path, *words, *more, ranks=ranks), alone(words))


def test_another_number_of_ranks_resumes(tmp_path, alone):
    saving = ("training.save_freq=1",)
    train(tmp_path, *saving, ranks=2, steps=1)
    check_same(train(tmp_path, *saving, ranks=4), alone(()))
