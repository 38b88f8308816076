"""`worker.actor.fsdp.cpu_offload` on one process, which becomes the only rank: the run of the plain process, bitwise,
resumed after an error too; and it restarts in this process."""

import gc
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_helpers import run_in_fork
from run_helpers import read_metrics, tiny_settings
from safetensors.torch import load_file
from torch.distributed.fsdp import CPUOffloadPolicy

import mtrl
from mtrl.config import read_overrides
from mtrl.distributed.torchrun_group import INTERFACES
from mtrl.models.parallel import fsdp
from mtrl.workers.learner import Learner

pytestmark = [
    pytest.mark.slow,  # five runs
    pytest.mark.skipif(os.environ.get("OMP_NUM_THREADS") != "1", reason="as in the other tests of ranks"),
]

STEPS = 2
OFFLOADS = {
    "worker.actor.fsdp.cpu_offload": True,
    "worker.actor.offload.offload_params": True,
    "worker.actor.offload.offload_optimizer": True,
}


class FailsAfter(mtrl.Callback):
    def __init__(self, step):
        self.last = step

    def metrics(self, step, metrics):
        table = Path(f"/proc/{os.getpid()}/net/tcp").read_text().splitlines()[1:]
        mine = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if os.path.lexists(link)}
        rows = [row.split() for row in table]
        self.listens = {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine}
        if step == self.last:
            raise ValueError("the first attempt ends here")


def trainer(output, settings, callbacks=()):
    keys = read_overrides(tiny_settings()) | {
        "training.output_dir": str(output), "training.max_steps": STEPS, "training.val_freq": -1,
        "training.val_before_train": False, "training.save_freq": 1, "optimization.disable_divergence": False,
        "optimization.advantage_estimator": "gae", **settings,
    }  # fmt: skip
    return mtrl.Trainer(callbacks=callbacks, **keys)


def test_a_single_rank_trains_as_the_plain_process(tmp_path):
    run_in_fork(compare_with_plain_process, tmp_path, tmp_path)


def compare_with_plain_process(tmp_path):
    policies = []
    shard = fsdp.fully_shard
    fsdp.fully_shard = lambda unit, **o: policies.append(o["offload_policy"]) or shard(unit, **o)
    plain = trainer(tmp_path / "plain", {}).train()
    assert not policies
    with pytest.raises(Exception, match="the first attempt ends here"):
        trainer(tmp_path / "offloaded", OFFLOADS, [fails := FailsAfter(1)]).train()
    assert fails.listens == {"0100007F"}, "127.0.0.1 alone"
    assert not os.environ.keys() & INTERFACES
    assert not dist.is_initialized(), "it leaves no process group"
    offloaded = trainer(tmp_path / "offloaded", OFFLOADS).train()
    assert policies and all(isinstance(policy, CPUOffloadPolicy) for policy in policies)
    assert not dist.is_initialized()
    found, expected = read_metrics(offloaded), read_metrics(plain)
    assert found.keys() == expected.keys() and len(found) >= STEPS
    for place, row in expected.items():
        assert found[place] == row, place
    for file in ("model.safetensors", "trainer/optimizer.safetensors"):
        weights, others = (load_file(run / f"checkpoints/step_{STEPS}" / file) for run in (plain, offloaded))
        assert weights.keys() == others.keys()
        assert all(torch.equal(others[name], weight) for name, weight in weights.items()), file


def test_it_restarts_with_smaller_passes_and_frees_its_models(tmp_path):
    run_in_fork(restart, tmp_path, tmp_path)


def restart(tmp_path):
    calls, try_gradients = [], Learner._try_gradients

    def fails_once(learner, batch, loss):
        calls.append((learner.cut_to, sum(type(each) is type(learner.model) for each in gc.get_objects())))
        return (None, "as if the device was full.") if len(calls) == 2 else try_gradients(learner, batch, loss)

    Learner._try_gradients = fails_once
    settings = OFFLOADS | {"optimization.advantage_estimator": "grpo", "optimization.disable_divergence": True}
    run = trainer(tmp_path, settings).train()
    sizes, models = zip(*calls, strict=True)
    assert sizes[:2] == (0, 0) and len(set(sizes[2:])) == 1 and sizes[2] > 0
    assert set(models[2:]) == {1}, "those of the first attempt are gone when the second one learns"
    assert {(1, False), (STEPS, False)} <= read_metrics(run).keys()
