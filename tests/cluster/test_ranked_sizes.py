"""What every rank holds, counted on live ones, against the formulas of docs/scaling.md that `mtrl doctor` goes by."""

import pytest
from rank_helpers import run_ranks
from sharded_helpers import LOSS, LOSSES, TEXT_AND_ONE_IMAGE, make_batches
from tiny_models import checkpoint

from mtrl.compose.memory_limits import make_plan
from mtrl.compose.worker_groups import WorkerPlan, build_roles
from mtrl.config import load_config
from mtrl.memory.estimate import count_held, estimate, local_sizes
from mtrl.memory.fake_model import FakeModel
from mtrl.memory.shard_sizes import Split, gathered_gradients, gathered_weights, layer_sizes
from mtrl.models.families import load_model_config
from mtrl.models.model_size import critic_tensors, model_size
from mtrl.models.parallel.fsdp import local_tensor

FAMILY = "qwen2_5_vl"
PROMPTS = {"dataset.rollout_batch_size": 64, "worker.actor.global_batch_size": 64}
NAMES = {
    "weights", "weights of the engine", "weights of the reference", "weights of the critic", "optimizer state",
    "optimizer state of the critic",
}  # fmt: skip


def config_for(ranks, strategy="FULL_SHARD", **overrides):
    return load_config(
        None,
        {
            "worker.actor.model.model_path": str(checkpoint(FAMILY)),
            "worker.actor.fsdp.sharding_strategy": strategy,
            "worker.actor.fsdp.mixed_precision_dtype": "fp32",
            "optimization.advantage_estimator": "gae",
            "optimization.disable_divergence": False,
            "worker.reward.functions": ("accuracy",),
            "training.n_gpus_per_node": ranks,
            **overrides,
        },
    )


def counted(ranks, config, batches, values):
    """Bytes on this rank after an update of actor and critic; gradients while they are there."""
    roles = build_roles(WorkerPlan(config, 4, has_reference=True, syncs_reference=False, has_critic=True), ranks)
    actor, critic = roles["actor"].worker, roles["critic"].worker
    found = {}

    def of(tensors):
        return sum(local_tensor(tensor).nbytes for tensor in tensors)

    for name, worker in (("gradients", actor), ("gradients of the critic", critic)):
        learner, move = worker.learner, worker.learner._step_optimizer

        def weighed(name=name, learner=learner, move=move):
            found[name] = of(parameter.grad for parameter in learner.parameters)
            move()

        learner._step_optimizer = weighed
    actor.update(batches, LOSS)
    critic.update(values, LOSSES["critic"])
    states = [of(w.learner._large_states(w.learner.parameters)) for w in (actor, critic)]
    return found | {
        "weights": of(actor.model.parameters()),
        "weights of the engine": of(roles["engine"].generator.backbone.model.parameters()),
        "weights of the reference": of(actor.reference.forward.backbone.model.parameters()),
        "weights of the critic": of(critic.model.parameters()),
        "optimizer state": states[0],
        "optimizer state of the critic": states[1],
    }


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [(2, "FULL_SHARD"), pytest.param(4, "FULL_SHARD", marks=pytest.mark.slow),
     pytest.param(2, "NO_SHARD", marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_rank_holds_the_bytes_of_the_formula(ranks, strategy, tmp_path):
    config = config_for(ranks, strategy)
    batches = make_batches("actor", FAMILY, TEXT_AND_ONE_IMAGE)[:1]
    values = make_batches("critic", FAMILY, TEXT_AND_ONE_IMAGE)[:1]
    plan, model = make_plan(config, on_gpu=False), load_model_config(str(checkpoint(FAMILY)))
    fake = FakeModel(model, plan).model
    size, critic = model_size(fake), critic_tensors(fake)
    expected = {name: part for name, part in count_held(size, plan, *critic).items() if name in NAMES}
    expected["gradients"] = 4 * sum(local_sizes(size.learning, plan))
    expected["gradients of the critic"] = 4 * sum(local_sizes(critic[1], plan))
    whole, parts = 4 * size.parameters, 1 if strategy == "NO_SHARD" else ranks
    assert expected["weights"] == pytest.approx(whole / parts, rel=0.001), "P / W"
    assert expected["weights of the engine"] == whole, "P for any W"
    for found in run_ranks(ranks, counted, tmp_path, config, batches, values):
        assert found == {name: pytest.approx(part, rel=0.01) for name, part in expected.items()}


def test_the_estimate_includes_gathered_weights():
    config = config_for(8, "HYBRID_SHARD", **{"training.nnodes": 4, **PROMPTS})
    plan, model = make_plan(config, on_gpu=False), load_model_config(str(checkpoint(FAMILY)))
    assert plan.split == Split(ranks=32, parts=8, own_engine=True) and plan.limits.prompts == 2
    found = estimate(model, plan, ["probe", "update"])
    fake = FakeModel(model, plan).model
    layers, rest = layer_sizes(fake)
    assert sum(layers) + rest == found.parameters and len(layers) > 2
    assert found.phases["probe"]["weights gathered"] == 4 * (rest + 2 * max(layers))
    assert found.phases["update"]["gradients not yet summed"] == 8 * (rest + max(layers))
    assert gathered_weights(fake, Split(2, 2, stays_gathered=True), 2) == 2 * found.parameters
    fake.requires_grad_(False)
    assert gathered_gradients(fake, 2) == 0


def test_ranks_that_share_sequences_have_the_same_rows():
    config = config_for(4, **{"worker.actor.ulysses_size": 2, **PROMPTS})
    plan = make_plan(config, on_gpu=True)
    assert (plan.split.ranks, plan.split.parts, plan.limits.prompts) == (2, 4, 32)


def test_with_cpu_offload_only_the_engine_stays_on_the_device():
    config = config_for(4, **{"worker.actor.fsdp.cpu_offload": True, "worker.actor.offload.offload_optimizer": True})
    plan = make_plan(config, on_gpu=True)
    assert not plan.offload_optimizer, "it is worked on there"
    size = model_size(FakeModel(load_model_config(str(checkpoint(FAMILY))), plan).model)
    assert count_held(size, plan).keys() == {"weights of the engine", "workspaces of cuBLAS"}
