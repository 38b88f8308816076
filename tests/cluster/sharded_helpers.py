"""Workers on ranks and in a single process, batches for them, and a comparison of their results."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import close, fake_batch, same
from rank_helpers import run_ranks
from tiny_models import checkpoint, get_encoder, prompts_for, random_rollouts

from mtrl.algorithms.credit import assign
from mtrl.algorithms.credit.attention_weights import AttentionWeights
from mtrl.algorithms.losses import Loss, Ppo, loss_weights, mismatch_correction
from mtrl.algorithms.value_loss import ValueLoss
from mtrl.distributed.learner_proxy import DistributedLearner, WorkerHandle
from mtrl.distributed.torchrun_group import TorchrunWorkerGroup, serve
from mtrl.models.adapters import AdapterSettings, add_adapters, inject_adapters, quantize_base
from mtrl.models.backbone import Backbone
from mtrl.models.forward import Forward
from mtrl.models.load_model import empty_model, load_model
from mtrl.models.parallel.fsdp import Sharding
from mtrl.models.parallel.ranks import SINGLE_PROCESS
from mtrl.models.parallel.sequence import make_sp_group
from mtrl.models.perturb import Perturbation
from mtrl.models.state_dicts import exported_weights
from mtrl.models.value_head import empty_value_model, load_value_model
from mtrl.models.views import ImageViews
from mtrl.types import VIEWS, Experience, Needs, Rewards, Rollouts, TrainBatch
from mtrl.workers.actor import LocalActor
from mtrl.workers.critic import LocalCritic
from mtrl.workers.learner import OptimizerSettings
from mtrl.workers.micro_batches import MicroBatching
from mtrl.workers.reference import Reference

UPDATES = 5
SETTINGS = OptimizerSettings(
    lr=1e-4, warmup_steps=2, total_steps=UPDATES, lr_scheduler_type="cosine", max_grad_norm=0.01
)
LORA = AdapterSettings(lora_rank=4, lora_alpha=8, lora_vision_tower=True, seed=3)
CPU = torch.device("cpu")
# Prompts with one image, none, several, one. Groups are uneven, and the token budget splits the first group.
MIXED = [0, 0, 0, 0, 1, 1, 2, 2, 3, 3], [6, 2, 9, 5, 4, 1, 7, 3, 5, 5]
TEXT_AND_ONE_IMAGE = [0, 0, 1, 1, 1], [6, 2, 4, 3, 8]  # one rank has the image, the other only text
TEXT_ALONE = [1, 1, 1], [4, 3, 8]  # no images, and the second rank has no rows
ONE_GROUP = [0, 0, 0], [6, 2, 9]  # the second rank has no rows
BUDGET = MicroBatching(tokens=60)
CLIP = 2.0  # maximum of the correction for an engine's log-probs
NEEDS = Needs(
    "old_logprobs", "entropy", "entropy_change", "dependency", "layer_similarity", "attention_mass", "ref_logprobs"
)


# -------------------------------------------------------------------------------------------------------- the workers
def make_backbone(family, kind, ranks, strategy, checkpointing=False, per_node=1, cpu_offload=False, dtype="fp32"):
    """Loads the whole model in a single process; on several ranks, shards the first rank's copy."""
    path = checkpoint(family)
    if ranks.group is None:
        model = (load_value_model if kind == "critic" else load_model)(path, dtype=dtype)
        if kind == "qlora":
            quantize_base(model, CPU)
        if kind in ("lora", "qlora"):
            add_adapters(model, LORA)
    else:
        empty = (empty_value_model if kind == "critic" else empty_model)(path, dtype=dtype)
        if kind == "qlora":
            quantize_base(empty, torch.device("meta"))
        if kind in ("lora", "qlora"):
            empty.requires_grad_(False)
            inject_adapters(empty, LORA, empty=True)
        load = partial(make_backbone, family, kind, SINGLE_PROCESS, strategy, dtype=dtype)
        model = Sharding(ranks, CPU, strategy, per_node, cpu_offload=cpu_offload).load_sharded(
            empty, lambda: load().model
        )
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    backbone = Backbone(model, ranks=ranks)
    if kind == "frozen tower":
        backbone.vision_tower.requires_grad_(False)
    return backbone


def make_worker(
    kind,
    family,
    batching,
    ranks=SINGLE_PROCESS,
    strategy="FULL_SHARD",
    checkpointing=False,
    per_node=1,
    cpu_offload=False,
    offload_optimizer=False,
    optimizer=None,
    dtype="fp32",
):
    backbone = make_backbone(family, kind, ranks, strategy, checkpointing, per_node, cpu_offload, dtype)
    forward = Forward(backbone, get_encoder(family))
    settings = replace(SETTINGS, **(optimizer or {}))
    options = {"update_batching": batching, "probe_batching": batching, "encoder_files": {}}
    options["offload_optimizer"] = offload_optimizer
    if kind == "critic":
        return LocalCritic(forward, settings, **options)
    if kind in ("lora", "qlora"):
        reference = Reference.under_adapters(forward)
    else:
        other = make_backbone(family, kind, ranks, strategy, False, per_node, cpu_offload, dtype).model
        reference = Reference.from_model(other, forward)
    return LocalActor(forward, settings, views=ImageViews(Perturbation(seed=3)), reference=reference, **options)


# --------------------------------------------------------------------------------------------------------- the batches
def noise(like, seed, scale=1.0):
    return scale * torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))


def make_batches(kind, family, rows):
    """One batch per update, made by a single process, with slightly changed old log-probs. `rows`: groups and lengths
    of random responses, or rollouts of an engine."""
    rollouts = rows if isinstance(rows, Rollouts) else random_rollouts(prompts_for(family), *rows)
    mask = rollouts.mask
    if kind == "critic":
        zeros = torch.zeros(mask.shape)
        batches = (fake_batch(rollouts, zeros, zeros) for _ in range(UPDATES))
        return [
            replace(batch, values=noise(mask, seed, 0.3), returns=noise(mask, seed + 9).where(mask, 0.0))
            for seed, batch in enumerate(batches)
        ]
    actor = make_worker("actor", family, MicroBatching(rows=len(rollouts)))
    needs = Needs("old_logprobs", "attention_mass") if kind == "tprl" else Needs("old_logprobs")
    signals = actor.probe(rollouts, needs, 0)
    return [actor_batch(kind, rollouts, signals, seed) for seed in range(UPDATES)]


def actor_batch(kind, rollouts, signals, seed):
    mask = rollouts.mask
    advantage = noise(mask[:, :1], seed + 1).expand(mask.shape).where(mask, 0.0)
    old, weights = signals.old_logprobs + noise(mask, seed + 20, 0.3), loss_weights(mask.float(), mask, "grpo", 16)
    if kind == "tprl":
        zeros = torch.zeros(len(rollouts))
        rewards = Rewards(zeros, {}, zeros.bool())
        credit = assign(
            [AttentionWeights(token_weight_target="mask")], Experience(rollouts, rewards, signals, advantage), (0, 0)
        )
        assert credit.weights.std() > 0.01
        advantage, weights = credit.advantage, loss_weights(credit.token_weight, credit.keep_mask, "dapo", 16)
    correction = mismatch_correction(old, rollouts.rollout_logprobs, mask, CLIP, "token") if kind == "engine" else None
    batch = TrainBatch(rollouts, old, advantage, torch.ones(mask.shape) if correction is None else correction, weights)
    return replace(batch, ref_logprobs=signals.old_logprobs + noise(mask, seed + 40, 0.5))


LOSSES = {
    "critic": ValueLoss(0.5),
    "full divergence": Loss(Ppo(), divergence="full", divergence_coef=0.1),
}
LOSS = Loss(Ppo(), divergence="low_var_kl", divergence_coef=0.1, entropy_penalty_coef=0.06)


def learn(worker, kind, batches, parts=()):
    """Signals before the first update, the metrics of each update, and signals after the last. `parts`: the prompts of
    each optimizer step of an update, instead of one step of all."""
    loss, rollouts = LOSSES.get(kind, LOSS), batches[0].rollouts
    needs = Needs("values") if kind == "critic" else NEEDS
    before = worker.probe(rollouts, needs, 4)
    metrics = [worker.update(cut_batch(batch, parts), loss) for batch in batches]
    return before, metrics, worker.probe(rollouts, needs, 4)


def cut_batch(batch, parts):
    rows = [torch.isin(batch.rollouts.group, torch.tensor(part)).nonzero()[:, 0] for part in parts]
    return [batch.rows(each) for each in rows] or [batch]


def on_rank(ranks, kind, family, batching, batches, options):
    sp_size, parts = options.pop("sp_size", 1), options.pop("parts", ())
    ranks = replace(ranks, sp_group=make_sp_group(sp_size))
    worker = make_worker(kind, family, batching.over(ranks), ranks, **options)
    roles = {"worker": WorkerHandle(worker, returns_signals=ranks.sp_group.is_first)}
    found = None
    if ranks.is_first:
        worker_group = TorchrunWorkerGroup(ranks, roles)
        found = learn(DistributedLearner(worker_group, "worker", sp_size=sp_size), kind, batches, parts)
        worker_group.close()
    else:
        serve(ranks, roles)
    return found, {name: tensor.clone() for name, tensor in exported_weights(worker.model).items()}


def check(
    kind, family, rows, tmp_path, batching=BUDGET, sizes=(1, 2), updates=UPDATES, atol=2e-6, rtol=2e-5, **options
):
    batches = make_batches(kind, family, rows)[:updates]
    single = make_worker(kind, family, batching, optimizer=options.get("optimizer"))
    start = {name: tensor.clone() for name, tensor in exported_weights(single.model).items()}
    before, metrics, after = learn(single, kind, batches, options.get("parts", ()))
    weights = exported_weights(single.model)
    moved = max(float((weights[name] - start[name]).abs().max()) for name in weights)
    assert moved > 100e-6, "fifty times the usual tolerance"
    for size in sizes:
        results = run_ranks(size, on_rank, tmp_path / str(size), kind, family, batching, batches, options)
        (their_before, their_metrics, their_after), _ = results[0]
        for _, theirs in results:
            assert theirs.keys() == weights.keys()
            worst = max(float((theirs[name] - weights[name]).abs().max()) for name in weights)
            assert worst < atol, f"weights differ by {worst} on {size} ranks"
        for mine, other in zip(metrics, their_metrics, strict=True):
            assert mine.keys() == other.keys()
            for name, value in mine.items():
                assert other[name] == pytest.approx(value, rel=rtol, abs=2e-6), (size, name)
        for mine, other in ((before, their_before), (after, their_after)):
            for name in VIEWS:
                if (signal := getattr(mine, name)) is None:
                    assert getattr(other, name) is None
                else:
                    close(getattr(other, name), signal, rtol=2e-5, atol=5e-5)


def as_streams(rollouts):
    """Responses without their prompts, as a rank sends them."""
    return [(rows.group, rows.tokens, rows.mask, rows.rollout_logprobs, rows.text, rows.version) for rows in rollouts]


def same_responses(found, expected):
    """Asserts that the ranks' responses, before and after an update, equal those of a single engine."""
    for rows, (group, tokens, mask, behaviour, text, version) in zip(expected, found, strict=True):
        same(group, rows.group)
        same(mask, rows.mask)
        same(tokens.where(mask, 0), rows.tokens.where(rows.mask, 0))
        torch.testing.assert_close(behaviour, rows.rollout_logprobs, rtol=1e-4, atol=1e-4)
        assert text == rows.text
        same(version, rows.version)
    assert expected[0].text != expected[1].text, "the new weights give other responses"
