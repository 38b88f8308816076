"""One process, one rank and two ranks: the same recorded rollouts make the same weights, metrics and signals."""

import pytest
from sharded_helpers import MIXED, ONE_GROUP, TEXT_AND_ONE_IMAGE, check

from mtrl.workers.micro_batches import MicroBatching


# ----------------------------------------------------------------------------------------------------------- the tests
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_mixed_batches(family, tmp_path):
    check("actor", family, MIXED, tmp_path)


def test_a_text_model(tmp_path):
    check("actor", "qwen2", MIXED, tmp_path)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_an_image_on_one_rank_alone(family, tmp_path):
    """The tower runs on both, or both wait for ever."""
    check("actor", family, TEXT_AND_ONE_IMAGE, tmp_path, sizes=(2,))


def test_a_rank_without_rows_goes_along(tmp_path):
    check("actor", "qwen2_5_vl", ONE_GROUP, tmp_path, MicroBatching(tokens=30), sizes=(2,))


def test_a_critic(tmp_path):
    check("critic", "qwen2_5_vl", TEXT_AND_ONE_IMAGE, tmp_path)


def test_token_weights_by_attention(tmp_path):
    check("tprl", "qwen3_vl", TEXT_AND_ONE_IMAGE, tmp_path)


def test_adapters(tmp_path):
    check("lora", "qwen2_5_vl", TEXT_AND_ONE_IMAGE, tmp_path)


def test_the_divergence_over_the_vocabulary(tmp_path):
    check("full divergence", "qwen2_5_vl", TEXT_AND_ONE_IMAGE, tmp_path, sizes=(2,))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"])
def test_other_strategies(strategy, tmp_path):
    check("actor", "qwen2_5_vl", TEXT_AND_ONE_IMAGE, tmp_path, sizes=(2,), strategy=strategy, checkpointing=True)


@pytest.mark.slow
def test_rows_of_ranks_that_hold_the_same(tmp_path):
    options = {"strategy": "HYBRID_SHARD", "per_node": 2}
    check("actor", "qwen2_5_vl", TEXT_AND_ONE_IMAGE, tmp_path, sizes=(4,), **options)
