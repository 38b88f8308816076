"""Ranks with sequence parallelism compute the same signals as one process, and learn the same."""

import os
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from helpers import close
from rank_helpers import run_ranks
from run_helpers import get_run_dir, train_arguments
from safetensors.torch import load_file
from sharded_helpers import CPU, MIXED, ONE_GROUP, TEXT_AND_ONE_IMAGE, check
from tiny_models import fresh_backbone, get_encoder, plain_logp, prompts_for, random_rollouts, shared_backbone
from torch import Tensor

from mtrl.algorithms.signals import SHIFTS
from mtrl.cli import main
from mtrl.compose.worker_groups import WorkerPlan, check_sequence_parallel
from mtrl.config import ConfigError, load_config
from mtrl.models.backbone import explain_no_sequence_parallel
from mtrl.models.forward import Forward
from mtrl.models.parallel.ranks import SINGLE_PROCESS, Ranks
from mtrl.models.parallel.sequence import SequenceParallelGroup, explain_indivisible_heads, make_sp_group
from mtrl.models.perturb import Perturbation
from mtrl.models.views import ImageViews
from mtrl.tracking.jsonl import read_rows
from mtrl.types import Needs, Signal
from mtrl.workers.micro_batches import MicroBatching

LAYOUTS = {
    "shared": {"share_prefix": True},
    "packed": {"share_prefix": True, "packed": True, "top_p": 0.9},
    "rows": {"share_prefix": False, "perception_estimator": "full_kl"},  # causal: there is no mask
}


@dataclass(frozen=True)
class TopTwo(Signal):
    """A user's signal: two numbers per token, which compare the views."""

    name: ClassVar[str] = "top_two"
    shape: ClassVar[tuple[int, ...]] = (2,)
    views: ClassVar[int] = 2

    def measure(self, original, perturbed):
        before, after = (view.map_log_probs(lambda x, _: x.topk(2).values) for view in (original, perturbed))
        return after - before


NEEDS = Needs(
    "old_logprobs",
    "entropy",
    "support",
    "entropy_change",
    "dependency",
    "similarity",
    "token_similarity",
    "layer_similarity",
    *SHIFTS,
    "attention_mass",
    "prompt_attention_mass",
    *("kl@none", "jsd@none", "logprobs@black", "entropy@none"),
    custom=[TopTwo()],
)


# ----------------------------------------------------------------------------------------------- passes, without FSDP
def passes(family, ranks=SINGLE_PROCESS):
    """Log-probs, signals, and gradients of a loss that no token has to itself, by layout."""
    backbone = fresh_backbone(family)
    backbone.ranks = ranks
    widths, patches = [], []
    if backbone.images is not None:
        run_tower = backbone.images.run_tower
        backbone.images.run_tower = lambda pixels, grids: patches.append(len(pixels)) or run_tower(pixels, grids)
    backbone.language_model.layers[0].mlp.register_forward_hook(lambda _, given, made: widths.append(made.shape[1]))
    rollouts = random_rollouts(prompts_for(family), *MIXED)
    images = ImageViews(Perturbation(seed=3))
    views = {name: [images.media(name, each, 1) for each in rollouts.prompts] for name in NEEDS.other_views}
    weights = torch.randn(rollouts.mask.shape, generator=torch.Generator().manual_seed(1))
    found = {}
    for name, options in LAYOUTS.items():
        forward = Forward(backbone, get_encoder(family), 0.7, chunk=7, **options)
        signals = forward.signals(rollouts, NEEDS, views)
        widths.clear(), patches.clear()
        backbone.model.zero_grad()
        logp = forward.logp(rollouts)
        (weights * logp).sum(1).tanh().sum().backward()
        own = {each: p.grad.clone() for each, p in backbone.model.named_parameters() if p.grad is not None}
        grads = {each: grad.clone() for each, grad in own.items()}
        for each in grads if ranks.size > 1 else ():
            dist.all_reduce(grads[each])
        hidden = forward.response_hidden(rollouts)
        found[name] = SimpleNamespace(
            logp=logp.detach(),
            signals=signals,
            own=own,
            grads=grads,
            width=widths[0],
            tokens=len(hidden),
            patches=sum(patches[:1]),
        )
    maps = Forward(backbone, get_encoder(family)).maps(rollouts.rows(torch.tensor([0])), [0, 3])
    return found, maps


def in_one_group(ranks):
    return replace(ranks, sp_group=make_sp_group(ranks.size))


def on_rank(ranks, family):
    return passes(family, in_one_group(ranks))


def agree(family, size, folder):
    expected, maps = passes(family)
    tokens = sum(MIXED[1])
    for found, their_maps in run_ranks(size, on_rank, folder, family):
        close(their_maps, maps, rtol=1e-5, atol=1e-6)
        for name, mine in expected.items():
            theirs = found[name]
            close(theirs.logp, mine.logp, rtol=1e-5, atol=3e-5)
            found_signals = {**vars(theirs.signals), **theirs.signals.extra}
            for signal, values in {**vars(mine.signals), **mine.signals.extra}.items():
                if isinstance(values, Tensor):
                    close(found_signals[signal], values, rtol=1e-4, atol=5e-5)
            assert theirs.grads.keys() == mine.grads.keys()
            for each, grad in mine.grads.items():
                close(theirs.grads[each], grad, rtol=1e-4, atol=2e-5 * max(1.0, float(grad.abs().max())))
            assert mine.width <= size * theirs.width < mine.width + 2 * 128, "each has its part of the positions"
            if name == "packed" and mine.patches:
                assert theirs.patches < mine.patches, "no rank encodes all images"
            assert abs(size * theirs.tokens - tokens) <= size * (size - 1), "each has its share of the vocabulary"
            for part in ("embed_tokens", "mlp.up_proj", "patch_embed", "deepstack_merger_list"):
                for each in (each for each in mine.grads if part in each and each.endswith("weight")):
                    assert mine.grads[each].abs().max() > 1e-3 and not torch.equal(theirs.own[each], mine.grads[each])
    return expected


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_two_ranks_share_a_sequence(family, tmp_path):
    expected = agree(family, 2, tmp_path)
    if family == "qwen3_vl":
        assert any("deepstack_merger_list" in name for name in expected["shared"].grads)
    rollouts = random_rollouts(prompts_for(family), *MIXED)
    with torch.no_grad():
        close(expected["packed"].logp, plain_logp(family, rollouts, temperature=0.7), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen2", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def test_more_ranks_than_heads_of_keys(family, tmp_path):
    """Four ranks for two key heads: keys and values go to two ranks each."""
    assert shared_backbone(family).language_model.config.num_key_value_heads == 2
    agree(family, 4, tmp_path)


def by_blocks(ranks):
    """Signals by the mask that a GPU has, in blocks."""
    backbone = fresh_backbone("qwen3_vl")
    backbone.ranks, backbone.make_mask = in_one_group(ranks), lambda documents, packed, rule: documents.blocks(CPU)
    rollouts = random_rollouts(prompts_for("qwen3_vl"), *MIXED)
    forward = Forward(backbone, get_encoder("qwen3_vl"), packed=True)
    return forward.signals(rollouts, Needs("old_logprobs", "attention_mass"))


@pytest.mark.slow
def test_flex_attention_of_a_share_of_the_heads(tmp_path):
    forward = Forward(shared_backbone("qwen3_vl"), get_encoder("qwen3_vl"))
    expected = forward.signals(
        random_rollouts(prompts_for("qwen3_vl"), *MIXED), Needs("old_logprobs", "attention_mass")
    )
    for found in run_ranks(2, by_blocks, tmp_path):
        close(found.old_logprobs, expected.old_logprobs, rtol=1e-5, atol=3e-5)
        close(found.attention_mass, expected.attention_mass, rtol=1e-5, atol=3e-5)


def one_token(ranks, family):
    """Fewer response tokens than ranks: the last rank has none, and still takes part."""
    backbone = fresh_backbone(family)
    if ranks is not None:
        backbone.ranks = in_one_group(ranks)
    forward = Forward(backbone, get_encoder(family))
    logp = forward.logp(random_rollouts(prompts_for(family), [3], [1]))
    logp.sum().backward()
    grad = backbone.output_matrix.grad
    if ranks is not None:
        dist.all_reduce(grad)
    return logp.detach(), grad


def test_a_rank_without_a_token(tmp_path):
    expected, grad = one_token(None, "qwen2_5_vl")
    for logp, their_grad in run_ranks(2, one_token, tmp_path, "qwen2_5_vl"):
        close(logp, expected, rtol=1e-5, atol=1e-5)
        close(their_grad, grad, rtol=1e-4, atol=1e-5)


# --------------------------------------------------------------------------------------------------- updates, by FSDP
def test_two_ranks_learn_as_one_process(tmp_path):
    check("actor", "qwen2_5_vl", ONE_GROUP, tmp_path, sizes=(2,), updates=3, sp_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["actor", "tprl", "full divergence", "critic", "lora", "frozen tower"])
def test_all_that_learns(kind, tmp_path):
    check(kind, "qwen3_vl", TEXT_AND_ONE_IMAGE, tmp_path, sizes=(2,), sp_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
def test_two_groups_of_two(strategy, tmp_path):
    """Rows are distributed to groups, and only one group has an image."""
    options = {"strategy": strategy, "per_node": 2, "checkpointing": True, "sp_size": 2}
    check("actor", "qwen3_vl", TEXT_AND_ONE_IMAGE, tmp_path, sizes=(4,), **options)


# ------------------------------------------------------------------------------------------------------ a whole run
WORDS = ("training.max_steps=3", "training.save_freq=3", "training.val_freq=-1", "training.val_before_train=false")


def trained(ranks, output, *words):
    """`mtrl train` as torchrun would start it."""
    if ranks is not None:
        os.environ |= {"TORCHELASTIC_RUN_ID": "test", "RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.size)}
    try:
        return main(train_arguments(output, *WORDS, *words))
    except SystemExit as end:
        return end.code


@pytest.mark.slow
def test_a_run_of_two_that_share_is_the_run_of_one(tmp_path):
    words = ["optimization.enable_token_weights=true", "optimization.compute_attention_metrics=true"]
    assert trained(None, tmp_path / "one", *words) == 0
    words += ["training.n_gpus_per_node=2", "worker.actor.ulysses_size=2"]
    assert run_ranks(2, trained, tmp_path / "ranks", tmp_path / "two", *words) == [0, 0]
    rows = [read_rows(get_run_dir(tmp_path / each) / "metrics.jsonl") for each in ("one", "two")]
    steps = [[row for row in each if "actor/grad_norm" in row] for each in rows]
    assert len(steps[0]) == len(steps[1]) == 3
    for mine, theirs in zip(*steps, strict=True):
        compared = [name for name in mine if not name.startswith(("perf/", "time", "attempt"))]
        assert "actor/grad_norm" in compared and any("attention" in name for name in compared)
        for name in compared:
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-4, nan_ok=True), name
    ours, theirs = (
        load_file(get_run_dir(tmp_path / each) / "checkpoints/step_3/model.safetensors") for each in ("one", "two")
    )
    assert max(float((theirs[name] - weight).abs().max()) for name, weight in ours.items()) < 2e-5  # each step is 1e-4


# ----------------------------------------------------------------------------------------------------------- refusals
def test_an_indivisible_number_of_heads_is_an_error():
    explain = explain_indivisible_heads
    assert explain(28, 4, 4) is explain(28, 4, 2) is explain(16, 2, 8) is None
    assert "its 28 attention heads cannot be divided among 8 ranks; set a divisor of 28" in explain(28, 4, 8)
    assert "its 4 heads of keys and values cannot be divided among 6 ranks" in explain(12, 4, 6)
    unknown = SimpleNamespace(model_type="qwen3_next")
    assert "not known to be exact for the family 'qwen3_next'; set it to 1" in explain_no_sequence_parallel(unknown, 2)


def test_an_impossible_run_fails_before_any_process_starts():
    words = {"worker.actor.ulysses_size": 4, "training.n_gpus_per_node": 4}
    plan = WorkerPlan(load_config(None, words), 1, has_reference=False, syncs_reference=False, has_critic=False)
    with pytest.raises(
        ConfigError, match=r"worker\.actor\.ulysses_size: 4 ranks cannot split .* its 6 attention heads"
    ):
        check_sequence_parallel(plan)


def test_budgets_count_the_tokens_of_a_rank():
    rollouts = random_rollouts(prompts_for("qwen2"), *MIXED)
    batching, ranks = MicroBatching(tokens=40), Ranks(size=2, sp_group=SequenceParallelGroup(size=2))
    assert batching.over(ranks) == MicroBatching(tokens=80, ranks=ranks)
    assert len(batching.over(ranks).split(rollouts)) < len(batching.split(rollouts))
    assert MicroBatching(at_least=9).over(ranks).at_least == 18
