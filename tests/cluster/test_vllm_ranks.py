"""vLLM on several ranks: two ranks learn from its samples like one process, and each rank drives its own engine.

Needs vLLM (`make test-vllm`): a rank takes a quarter of a minute to import it."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from rank_helpers import run_ranks
from run_helpers import finish, get_run_dir, read_metrics, train_arguments
from sharded_helpers import check
from tiny_models import prompts_for
from vllm_engines import INSTALLED, child_process, end_in_process, engine_on, start_server, wait_until_ready

from mtrl.embedded.embedded_rows import MODEL_DIRECTORY
from mtrl.types import Sampling

assert run_ranks  # imported for this folder's fixture, since `check` forks
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")]

FAMILY = "qwen2_5_vl"
STEPS = 4
WORDS = (
    "worker.rollout.name=vllm", f"training.max_steps={STEPS}", "training.val_freq=2", "training.save_freq=-1",
    "worker.rollout.engine_kwargs.kv_cache_memory_bytes=67108864", "optimization.enable_token_weights=true",
)  # fmt: skip
SECONDS = 900  # longer is a hang, even on a busy machine
COMPARED = ("reward/", "actor/", "rollout/", "response/", "val/", "advantage/")


def test_ranks_learn_the_same_from_vllm_samples(tmp_path):
    """One process, one rank, two ranks; corrected for the distance between engine and trainer."""
    engine = engine_on(child_process(FAMILY), FAMILY)
    rollouts = engine.generate(prompts_for(FAMILY), Sampling(n=3, max_new_tokens=8, seed=2))
    end_in_process()
    assert len(rollouts) == 12 and rollouts.rollout_logprobs.abs().max() > 0.1
    check("engine", FAMILY, rollouts, tmp_path)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same run by one process."""
    output = tmp_path_factory.mktemp("alone")
    status, said = finish(train_arguments(output, *WORDS))
    assert status == 0, said
    return read_metrics(get_run_dir(output))


def by_torchrun(arguments, ranks=2):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, "-m", "mtrl", *arguments]


def by_ray(arguments):
    return [sys.executable, "-m", "mtrl", *arguments]


IN_CHILD = ("worker.rollout.mode=process",)
APART = ("worker.hybrid_engine=false", "worker.rollout.n_gpus=1")
IN_PARTS = ("worker.rollout.tensor_parallel_size=2",)  # two processes hold a half of each layer
TWO_IN_PARTS = (*IN_PARTS, "training.n_gpus_per_node=4")  # two engines of two
APART_IN_PARTS = ("worker.hybrid_engine=false", "worker.rollout.n_gpus=2", *IN_PARTS)


ON_SERVER = ("worker.rollout.mode=server",)
WAYS = {
    "torchrun": (by_torchrun, ()), "torchrun two in parts": (partial(by_torchrun, ranks=4), TWO_IN_PARTS),
    "ray": (by_ray, ()), "ray in parts": (by_ray, IN_PARTS), "ray in a child": (by_ray, IN_CHILD),
    "ray apart": (by_ray, APART), "ray apart in parts": (by_ray, APART_IN_PARTS),
    "ray apart in a child": (by_ray, (*APART, *IN_CHILD)),
    "torchrun with a server": (by_torchrun, ON_SERVER), "ray with a server": (by_ray, ON_SERVER),
}  # fmt: skip


@pytest.mark.parametrize(("launched", "words"), WAYS.values(), ids=WAYS.keys())
def test_engines_of_ranks(launched, words, tmp_path, alone):
    """The numbers equal those of one process: each engine got the gathered weights at every step."""
    words = (*WORDS, "training.n_gpus_per_node=2", *words)
    if set(ON_SERVER) <= set(words):
        words = (*words, f"worker.rollout.address={wait_until_ready(start_server(str(MODEL_DIRECTORY)))}")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        launched(train_arguments(tmp_path, *words)), env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_metrics(get_run_dir(tmp_path))
    assert found.keys() == alone.keys()
    gaps = [row["rollout/logprob_gap_max"] for row in found.values() if "rollout/logprob_gap_max" in row]
    assert len(gaps) == STEPS and max(gaps) < 1e-4, gaps
    for place, row in alone.items():
        for name, value in row.items():
            if name.startswith(COMPARED) and "logprob_gap" not in name:
                assert found[place][name] == pytest.approx(value, rel=1e-3, abs=1e-4), (place, name)
