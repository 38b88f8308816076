"""Adapters on a base in 4 bits on ranks: the numbers, responses and checkpoints of one process. Each rank holds the
4-bit weights whole and its shard of everything else; its engine uses the same 4-bit tensors."""

import pytest
import torch
from rank_helpers import run_ranks
from sharded_helpers import (
    LOSS,
    TEXT_AND_ONE_IMAGE,
    actor_batch,
    as_streams,
    check,
    make_batches,
    make_worker,
    same_responses,
)
from test_sharded_checkpoints import BEFORE, check_metrics, check_weights, go_on
from test_sharded_checkpoints import on_rank as resume_on_rank
from tiny_models import checkpoint, prompts_for

from mtrl.compose.memory_limits import make_plan
from mtrl.compose.policy import build_actor, build_policy
from mtrl.compose.worker_groups import WorkerPlan, build_roles
from mtrl.config import load_config
from mtrl.distributed.generator_proxy import DistributedGenerator
from mtrl.distributed.learner_proxy import DistributedLearner
from mtrl.distributed.torchrun_group import TorchrunWorkerGroup, serve
from mtrl.memory.estimate import count_held
from mtrl.memory.fake_model import FakeModel
from mtrl.memory.shard_sizes import layer_sizes
from mtrl.models.adapters import layer_projections
from mtrl.models.families import load_model_config
from mtrl.models.model_size import model_size
from mtrl.models.parallel.fsdp import local_tensor
from mtrl.models.quantized import four_bit_layers
from mtrl.models.state_dicts import exported_weights
from mtrl.rollout.local import LocalGenerator
from mtrl.types import Needs, Sampling
from mtrl.workers.micro_batches import MicroBatching

pytest.importorskip("bitsandbytes")
FAMILY = "qwen2_5_vl"
SAMPLING = Sampling(n=3, max_new_tokens=6, seed=5, step=2)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
def test_updates_and_signals(family, tmp_path):
    check("qlora", family, TEXT_AND_ONE_IMAGE, tmp_path)


@pytest.mark.slow
def test_saved_by_two_and_resumed_by_one_and_three(tmp_path):
    batches = make_batches("qlora", FAMILY, TEXT_AND_ONE_IMAGE)
    whole = make_worker("qlora", FAMILY, MicroBatching(tokens=60))
    expected = go_on(whole, "qlora", batches, None)
    saved, rest = tmp_path / "saved", batches[BEFORE:]
    run_ranks(2, resume_on_rank, tmp_path / "two", "qlora", batches[:BEFORE], None, saved)
    assert {file.name for file in saved.glob("*.safetensors")} == {"adapter_model.safetensors"}
    alone = make_worker("qlora", FAMILY, MicroBatching(tokens=60))
    check_metrics(go_on(alone, "qlora", rest, saved), expected[BEFORE:])
    check_weights(exported_weights(alone.model), exported_weights(whole.model))
    found, *_ = run_ranks(3, resume_on_rank, tmp_path / "three", "qlora", rest, saved, tmp_path / "again")
    check_metrics(found[0], expected[BEFORE:])


# ------------------------------------------------------------------------------------------------- from a configuration
def config_for(path, ranks):
    return load_config(
        None,
        {
            "worker.actor.model.model_path": str(path),
            "worker.actor.model.peft_type": "qlora",
            "worker.actor.fsdp.mixed_precision_dtype": "fp32",
            "worker.actor.optim.name": "adamw_8bit",
            "worker.actor.optim.lr": 1e-2,
            "worker.actor.optim.warmup_steps": 0,
            "worker.actor.global_batch_size": 2,
            "dataset.rollout_batch_size": 2,
            "training.n_gpus_per_node": ranks,
        },
    )


def steps(actor, generator):
    """Responses, an update on them, and responses of the new weights."""
    with generator.resident():
        first = generator.generate(prompts_for(FAMILY), SAMPLING)
    signals = actor.probe(first, Needs("old_logprobs"), 0)
    actor.update([actor_batch("actor", first, signals, 1)], LOSS)
    with generator.resident():
        weights = actor.publish()
        generator.load(weights)
        second = generator.generate(prompts_for(FAMILY), Sampling(**vars(SAMPLING) | {"version": weights.version}))
    return first, second


def on_rank(ranks, path):
    """The responses, the bytes that the rank holds by purpose, and its 4-bit weights."""
    config = config_for(path, ranks.size)
    roles = build_roles(WorkerPlan(config, 4, has_reference=True, syncs_reference=False, has_critic=False), ranks)
    model, engine = roles["actor"].worker.model, roles["engine"].generator.backbone.model
    shared = {each.data_ptr() for each in model.buffers()}
    packed = four_bit_layers(model)
    for name, layer in four_bit_layers(engine).items():
        assert all(own is packed[name]._buffers[part] for part, own in layer._buffers.items()), "the same tensors"
    held = {
        "weights": [*map(local_tensor, model.parameters()), *(b for each in packed.values() for b in each.buffers())],
        "weights of the engine": [*engine.parameters(), *(b for b in engine.buffers() if b.data_ptr() not in shared)],
    }
    found = {name: sum(each.nbytes for each in tensors) for name, tensors in held.items()}
    found["packed"] = sum(each.packed.nbytes for each in packed.values())
    numbers = [each.packed.clone() for each in packed.values()]
    if not ranks.is_first:
        serve(ranks, roles)
        return None, found, numbers
    worker_group = TorchrunWorkerGroup(ranks, roles)
    responses = steps(DistributedLearner(worker_group, "actor"), DistributedGenerator(worker_group))
    worker_group.close()
    return as_streams(responses), found, numbers


def test_responses_of_one_process_and_bytes_of_the_formula(tmp_path):
    path = checkpoint(FAMILY)
    encoder, forward = build_policy(config_for(path, 1))
    actor = build_actor(config_for(path, 1), forward, encoder, 4)
    expected = steps(actor, LocalGenerator(forward.backbone, encoder))
    plan = make_plan(config_for(path, 2), on_gpu=False)
    fake = FakeModel(load_model_config(str(path)), plan).model
    weights = [each.weight for each in layer_projections(fake)]
    wide = [each.numel() for each in weights]
    (layers, rest), (gathered, same_rest) = layer_sizes(fake), layer_sizes(fake, but=weights)
    assert sum(gathered) == sum(layers) - sum(wide) and rest == same_rest
    formula = count_held(model_size(fake), plan, packed=wide)
    results = run_ranks(2, on_rank, tmp_path, path)
    same_responses(results[0][0], expected)
    own = [layer.packed for layer in four_bit_layers(forward.backbone.model).values()]
    for _, held, numbers in results:
        assert len(numbers) == len(own) > 0 and all(map(torch.equal, numbers, own)), "quantized once, for all ranks"
        assert held["packed"] == sum(wide) / 2, "whole on each rank"
        code = 4 * (16 + 256 + 1) * len(own)  # of tables that the formula leaves out: 1 kB for each weight
        assert held["weights"] - code == pytest.approx(formula["weights"], rel=0.01)
        assert held["weights of the engine"] == pytest.approx(formula["weights of the engine"], rel=0.01)
