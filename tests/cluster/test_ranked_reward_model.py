"""A reward model that two ranks hold together scores as the whole one does."""

import pytest
import torch
from rank_helpers import run_ranks
from reward_model_helpers import bert_reward_model, make_rollouts, make_task, text_reward_model, vision_reward_model
from tiny_models import get_encoder, picture

from mtrl.compose.reward_scorer import build_reward_model
from mtrl.config import load_config
from mtrl.distributed.learner_proxy import DistributedRewardModel
from mtrl.distributed.torchrun_group import TorchrunWorkerGroup, serve
from mtrl.models.parallel.fsdp import Sharding, is_dtensor

FAMILY, CPU = "qwen2_5_vl", torch.device("cpu")


def config_for(path):
    """Two responses a pass, so that ranks have to make idle ones."""
    rows = {"worker.actor.dynamic_batching": False, "worker.actor.micro_batch_size_per_device_for_experience": 2}
    rows["worker.actor.fsdp.mixed_precision_dtype"] = "fp32"
    return load_config(None, rows | {"worker.reward.reward_type": "model", "worker.reward.model_path": path})


def batches():
    """Groups of several sizes, one of them with two images; a single group, which leaves a rank without rows; and
    a group of responses that are longer than BERT accepts."""
    encoder = get_encoder(FAMILY)
    seen = [picture(encoder, 2, 2, seed=1), picture(encoder, 4, 3, seed=2)]
    given = [(make_task("which colour"), []), (make_task("compare these", 2), seen), (make_task("which red"), [])]
    words = ["red", " blue", " which red", " colour", " blue red", " red" * 20, " blue" * 30]
    several = make_rollouts(encoder, given, words, [0, 0, 0, 1, 1, 2, 2])
    return [several, make_rollouts(encoder, given[1:2], words[:1], [0])]


def on_rank(ranks, config, rollouts):
    worker = build_reward_model(config, Sharding(ranks, CPU))
    model = getattr(worker.model, "model", None) or worker.model.backbone.model
    assert all(map(is_dtensor, model.parameters())) and not any(p.requires_grad for p in model.parameters())
    if not ranks.is_first:
        return serve(ranks, {"reward": worker})
    worker_group = TorchrunWorkerGroup(ranks, {"reward": worker})
    found = [DistributedRewardModel(worker_group, "reward").score(each) for each in rollouts]
    worker_group.close()
    return found


@pytest.mark.parametrize(
    "kind", ["vision", pytest.param("text", marks=pytest.mark.slow), pytest.param("encoder", marks=pytest.mark.slow)]
)
def test_ranks_score_as_one_process(kind, tmp_path):
    made = {
        "text": text_reward_model,
        "encoder": bert_reward_model,
        "vision": lambda path: vision_reward_model(path, FAMILY),
    }[kind]
    made(tmp_path / "rm")
    config = config_for(str(tmp_path / "rm"))
    expected = [build_reward_model(config).score(rollouts) for rollouts in batches()]
    found, _ = run_ranks(2, on_rank, tmp_path / "ranks", config, batches())
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == [each if isinstance(each, str) else pytest.approx(each, rel=1e-4, abs=1e-5) for each in theirs]
    unread = [each for each in expected[0] if isinstance(each, str)]
    assert len(unread) == (2 if kind == "encoder" else 0) and len(set(expected[0])) > 4, "scores that differ"
