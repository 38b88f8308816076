"""A checkpoint holds the loop for no longer than its bytes take off the device. Skipped without one."""

import time
from dataclasses import replace

import pytest
import torch
from helpers import same
from safetensors.torch import load_file

from mtrl.checkpoint.folder_store import FolderStore
from mtrl.checkpoint.learner_snapshot import OPTIMIZER_STATE
from mtrl.embedded.embedded_rows import MODEL_DIRECTORY
from mtrl.models.device_copy import BUFFER_BYTES, copy_to_cpu
from mtrl.models.load_model import load_model
from mtrl.utils.machine import free_memory, usable_cores
from mtrl.workers.learner import Learner, OptimizerSettings
from mtrl.workers.micro_batches import MicroBatching

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GIB = 2**30


@pytest.fixture
def all_threads():
    """Fresh pages are slow on one processor; the suite computes with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(usable_cores())
    yield
    torch.set_num_threads(before)


@pytest.fixture
def learner():
    """An actor after one step, so that the optimizer has state."""
    model = load_model(MODEL_DIRECTORY, device="cuda")
    learner = Learner(model, OptimizerSettings(), MicroBatching(rows=8), name="actor", advice="")
    step(learner)
    return learner


def step(learner):
    for parameter in learner.parameters:
        parameter.grad = torch.randn_like(parameter)
    learner.optimizer.step()
    learner.optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_copies_are_equal(dtype):
    """Sizes around that of the buffers, of one element, and one that is not contiguous."""
    size = BUFFER_BYTES // torch.empty(0, dtype=dtype).element_size()
    shapes = [(), (3,), (size - 1,), (size + 1,), (5, size // 2), (0,)]
    tensors = [torch.randint(0, 2, shape, device="cuda").to(dtype) for shape in shapes]
    tensors.append(torch.randint(0, 2, (300, 500), device="cuda").to(dtype).T)
    for tensor, copy in zip(tensors, copy_to_cpu(tensors), strict=True):
        assert copy.device.type == "cpu" and copy.stride() == tensor.stride()
        same(copy, tensor.cpu())


def test_a_copy_is_ordered_with_earlier_and_later_device_work():
    weights = torch.zeros(64 << 20, device="cuda")
    for _ in range(50):
        weights += 1
    (copy,) = copy_to_cpu([weights])
    weights += 1
    assert bool((copy == 50).all())


def test_the_loop_is_held_for_as_long_as_the_bytes_take(learner, all_threads, capsys):
    nbytes = min(8 * GIB, free_memory() // 4)
    parts = [torch.randn(nbytes // 32, device="cuda") for _ in range(8)]  # 4 bytes an element
    large = {f"part {number}": part for number, part in enumerate(parts)}
    snapshot = replace(learner.snapshot({}), optimizer_state=large)
    seconds = []
    for _ in range(2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        copy = snapshot.detached()
        seconds.append(time.perf_counter() - begin)
    for name, tensor in large.items():
        same(copy.optimizer_state[name], tensor.cpu())
    begin = time.perf_counter()
    plain = [tensor.to("cpu", copy=True) for tensor in large.values()]
    usual = time.perf_counter() - begin
    size = sum(tensor.nbytes for tensor in plain) / 1e9
    with capsys.disabled():
        print(f"\n{size:.1f} GB: {seconds[0]:.2f} s, then {seconds[1]:.2f} s; plain copies {usual:.2f} s")
    assert seconds[0] < usual and seconds[1] < usual / 2, "the first one makes the pinned memory"


def test_the_written_state_is_the_state_at_the_call(learner, tmp_path):
    """The next update changes the weights while the file is being written."""
    snapshot = learner.snapshot({})
    weights = {name: tensor.cpu() for name, tensor in snapshot.weights.items()}
    states = {name: tensor.cpu() for name, tensor in snapshot.optimizer_state.items()}
    store = FolderStore(tmp_path)
    store.save(1, {"actor": snapshot}, {"step": 1})
    step(learner)
    store.close()
    written = load_file(tmp_path / "step_1" / OPTIMIZER_STATE)
    assert written.keys() == states.keys()
    for name, tensor in written.items():
        same(tensor, states[name])
    saved = load_model(tmp_path / "step_1").state_dict()
    for name, tensor in weights.items():
        same(saved[name], tensor)
    changed = [
        name for name, tensor in learner.model.state_dict().items() if not torch.equal(tensor.cpu(), saved[name])
    ]
    assert changed, "the learner went on"
