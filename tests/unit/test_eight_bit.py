"""AdamW with 8-bit state: it follows float32's, is small, and is restored bitwise. Skipped without bitsandbytes, whose
kernels run on a CPU too."""

import pytest
import torch

from mtrl.checkpoint.learner_snapshot import read_optimizer_state, restore_optimizer_state
from mtrl.workers import offload
from mtrl.workers.learner import Learner, OptimizerSettings
from mtrl.workers.micro_batches import MicroBatching
from mtrl.workers.offload import OffloadedTensors
from mtrl.workers.scale_blocks import fit_scales

pytest.importorskip("bitsandbytes")
SHAPES = {"projection": (64, 96), "wide": (40, 256), "norm": (96,)}


def make_learner(parks=False, **settings):
    model = torch.nn.Module()
    model.device = torch.device("cpu")
    for seed, (name, shape) in enumerate(SHAPES.items()):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 10
        model.register_parameter(name, torch.nn.Parameter(weight))
    made = OptimizerSettings(lr=1e-3, weight_decay=0.1, **settings)
    return Learner(model, made, MicroBatching(), name="", advice="", offload=parks)


def learn(learner, steps):
    """Noisy gradients of half the squared distance to a target."""
    for step in steps:
        for place, parameter in enumerate(learner.parameters):
            draw = torch.Generator().manual_seed(1000 * step + place)
            noise = torch.randn(parameter.shape, generator=draw) / 10
            target = torch.sin(torch.arange(parameter.numel()).float()).view(parameter.shape)
            parameter.grad = parameter.detach() - target + noise
        learner._step_optimizer()
        learner.optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in learner.parameters]


def test_it_goes_where_float32_goes():
    begin = learn(make_learner(), [])
    ours, theirs = (learn(make_learner(name=name), range(60)) for name in ("adamw_8bit", "adamw"))
    for start, here, there in zip(begin, ours, theirs, strict=True):
        way = there - start
        assert (here - there).norm() < 0.05 * way.norm() and way.norm() > 1e-2 * start.numel() ** 0.5
    assert torch.equal(ours[2], theirs[2]) or (ours[2] - theirs[2]).abs().max() < 1e-6, "small ones are in float32"


def test_a_byte_a_number():
    learner = make_learner(name="adamw_8bit")
    learn(learner, range(1))
    state = read_optimizer_state(learner.optimizer, learner.names)
    numbers = 64 * 96 + 40 * 256
    large = sum(tensor.nbytes for name, tensor in state.items() if not name.startswith("norm"))
    assert large == pytest.approx(2 * numbers * (1 + 4 / 256), rel=0.01)
    assert state["norm/exp_avg"].dtype == torch.float32 and state["wide/exp_avg"].dtype == torch.uint8


def test_it_resumes_bitwise(tmp_path):
    from safetensors.torch import save_file

    whole = learn(make_learner(name="adamw_8bit"), range(6))
    half, other = make_learner(name="adamw_8bit"), make_learner(name="adamw_8bit")
    weights = learn(half, range(3))
    (tmp_path / "trainer").mkdir()
    save_file(read_optimizer_state(half.optimizer, half.names), tmp_path / "trainer/optimizer.safetensors")
    with torch.no_grad():
        for parameter, weight in zip(other.parameters, weights, strict=True):
            parameter.copy_(weight)
    restore_optimizer_state(other.optimizer, other.names, tmp_path)
    assert all(map(torch.equal, learn(other, range(3, 6)), whole))


def test_offloaded_to_cpu_memory_between_its_steps(monkeypatch):
    monkeypatch.setattr(offload, "PIECE", 30_000)
    parked = make_learner(parks=True, name="adamw_8bit")
    assert len(parked.pieces) == 3 and isinstance(parked.pieces[0][1], OffloadedTensors)
    assert all(map(torch.equal, learn(parked, range(4)), learn(make_learner(name="adamw_8bit"), range(4))))
    places = [each.data_ptr() for each in parked._large_states(parked.parameters)]
    learn(parked, range(4, 5))
    assert [each.data_ptr() for each in parked._large_states(parked.parameters)] == places and len(places) == 10


def test_states_of_ranks_keep_their_scales_and_joined_blocks_take_the_largest():
    """900 numbers of two ranks, cut at 500: its block from 256 to 512 had two scales. By hand: bytes are percents."""
    values = torch.arange(256) / 100
    parameter, numbers = torch.nn.Parameter(torch.zeros(9, 100)), torch.full((9, 100), 40, dtype=torch.uint8)
    # 5 of the 9 rows: blocks of 0 to 256 and 256 to 500; then 500 to 512, 512 to 768, 768 to 900
    scales = torch.tensor([[1.0, 2.0, 0.0], [8.0, 4.0, 5.0]])
    fitted = fit_scales(parameter, numbers, scales, values)
    assert fitted.tolist() == [1.0, 8.0, 4.0, 5.0]
    flat = numbers.flatten()
    assert set(flat[256:500].tolist()) == {10}, "0.4 * 2 is 0.1 * 8"
    assert set(flat[:256].tolist()) | set(flat[500:].tolist()) == {40}
    assert fit_scales(parameter, numbers, fitted, values) is fitted
