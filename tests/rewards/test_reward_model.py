"""Reward models against plain transformers, row by row; models that are none; and their part of the total."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from reward_model_helpers import (
    GROUP,
    RESPONSES,
    bert_reward_model,
    make_rollouts,
    make_task,
    text_reward_model,
    vision_reward_model,
)
from safetensors.torch import load_file, save_file
from tiny_models import checkpoint, get_encoder, picture, plain_inputs, plain_model
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from mtrl.cli import main
from mtrl.compose.reward_scorer import build_scorer
from mtrl.config import ConfigError, load_config
from mtrl.embedded.embedded_rows import MODEL_DIRECTORY
from mtrl.models.reward_model import load_reward_model
from mtrl.tracking.jsonl import read_rows
from mtrl.workers.micro_batches import MicroBatching
from mtrl.workers.reward_model_worker import RewardModelWorker
from pretraining.tiny_checkpoints import VISION_FAMILIES, make_tiny_checkpoint

BY_ROWS = MicroBatching(rows=4)


# ---------------------------------------------------------------------------------------------------------------- text
def test_text_scores_equal_those_of_transformers_row_by_row(tmp_path):
    path = text_reward_model(tmp_path / "rm")
    counting = make_task("count the dogs and cats", system="you are a judge")
    tasks = [make_task("which colour"), counting, make_task("why")]
    rollouts = make_rollouts(get_encoder("qwen2"), [(task, ()) for task in tasks])
    found = RewardModelWorker(load_reward_model(path), BY_ROWS).score(rollouts)

    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    for row, (g, response) in enumerate(zip(GROUP, RESPONSES, strict=True)):
        chat = [*tasks[g].messages, {"role": "assistant", "content": response}]
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        assert text.endswith(f"{response}<|im_end|>\n")
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        assert found[row] == pytest.approx(model(**inputs).logits.item(), rel=1e-4, abs=1e-4)
    assert np.std(found) > 0.1, "the scores differ, otherwise the comparison is empty"


def test_without_a_template_prompt_and_response_are_concatenated(tmp_path):
    path = text_reward_model(tmp_path / "rm", template=False)
    rollouts = make_rollouts(get_encoder("qwen2"), [(make_task("which colour:"), ())], [" red", " blue"], [0, 0])
    found = RewardModelWorker(load_reward_model(path), BY_ROWS).score(rollouts)
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    plain = [
        model(**tokenizer(f"which colour:{word}", return_tensors="pt")).logits.item() for word in (" red", " blue")
    ]
    assert found == pytest.approx(plain, rel=1e-4, abs=1e-4)


def test_an_encoder_model_gets_its_special_tokens_and_its_limit(tmp_path):
    """BERT scores its [CLS]; a conversation longer than its positions fails alone."""
    model, tokenizer = bert_reward_model(tmp_path / "rm")
    responses = [" red", " blue", " red" * 20]
    rollouts = make_rollouts(get_encoder("qwen2"), [(make_task("which colour"), ())], responses, [0, 0, 0])
    found = RewardModelWorker(load_reward_model(str(tmp_path / "rm")), BY_ROWS).score(rollouts)
    inputs = tokenizer("which colour red", return_tensors="pt")
    assert inputs.input_ids[0].tolist() == [2, 5, 6, 7, 3]
    assert found[0] == pytest.approx(model(**inputs).logits.item(), rel=1e-4)
    assert found[1] != found[0]
    assert found[2] == "the reward model cannot read it: prompt and response have 24 tokens; the reward model reads 12"


def test_a_text_model_leaves_images_out(tmp_path):
    path, encoder = text_reward_model(tmp_path / "rm"), get_encoder("qwen2_5_vl")
    with_image = make_rollouts(encoder, [(make_task("which colour", images=1), [picture(encoder, 2, 3)])], ["red"], [0])
    without = make_rollouts(encoder, [(make_task("which colour"), [])], ["red"], [0])
    model = RewardModelWorker(load_reward_model(path), BY_ROWS)
    assert model.score(with_image) == model.score(without)


# -------------------------------------------------------------------------------------------------------------- images
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_vision_scores_are_the_heads_at_the_last_token_row_by_row(family, tmp_path):
    encoder = get_encoder(family)
    media = [[picture(encoder, 3, 5)], [], [picture(encoder, 2, 2, seed=1), picture(encoder, 4, 3, seed=2)]]
    tasks = [make_task("which colour", 1), make_task("count the dogs"), make_task("compare these", 2)]
    rollouts = make_rollouts(encoder, list(zip(tasks, media, strict=True)))
    reward_model = load_reward_model(vision_reward_model(tmp_path / "rm", family))
    found = RewardModelWorker(reward_model, BY_ROWS).score(rollouts)
    one_by_one = RewardModelWorker(reward_model, MicroBatching(rows=1)).score(rollouts)
    assert found == pytest.approx(one_by_one, rel=1e-3, abs=1e-3)

    head = load_file(tmp_path / "rm" / "model.safetensors")["score.weight"]
    end = "<end_of_turn>" if family == "gemma3" else "<|im_end|>"
    for row, (g, response) in enumerate(zip(GROUP, RESPONSES, strict=True)):
        prompt = rollouts.prompts[g]
        tail = encoder.tokenizer(f"{response}{end}\n", return_tensors="pt").input_ids[0]
        hidden = plain_model(family).model(**plain_inputs(encoder, prompt, tail)).last_hidden_state
        assert found[row] == pytest.approx((hidden[0, -1] @ head[0]).item(), rel=1e-3, abs=1e-3)
    assert np.std(found) > 0.1


def test_the_image_decides_and_is_seen_once_for_a_group(tmp_path, monkeypatch):
    encoder = get_encoder("qwen2_5_vl")
    reward_model = load_reward_model(vision_reward_model(tmp_path / "rm", "qwen2_5_vl"))
    seen = []
    encode_images = reward_model.backbone.encode_images
    monkeypatch.setattr(
        reward_model.backbone, "encode_images", lambda inputs: seen.append(len(inputs)) or encode_images(inputs)
    )
    prompts = [(make_task("which colour", 1), [picture(encoder, 3, 4, seed=s)]) for s in (1, 2)]
    first, second, other, *_ = RewardModelWorker(reward_model, MicroBatching(rows=4)).score(
        make_rollouts(encoder, prompts, ["red", "red", "red", "blue"], [0, 0, 1, 1])
    )
    assert first == pytest.approx(second, abs=1e-4) and abs(first - other) > 1e-2
    assert seen == [2]


def test_one_image_at_different_positions_of_two_prompts(tmp_path):
    """A cache may return the same array for several prompts; its position in each determines the rotary positions."""
    encoder = get_encoder("qwen2_5_vl")
    image = picture(encoder, 3, 4)
    later = make_task("which colour", 1)
    parts = [{"type": "text", "text": "look at this picture first"}, {"type": "image"}]
    earlier = replace(later, messages=({"role": "user", "content": parts},))
    rollouts = make_rollouts(encoder, [(later, [image]), (earlier, [image])], ["red", "red"], [0, 1])
    reward_model = load_reward_model(vision_reward_model(tmp_path / "rm", "qwen2_5_vl"))
    together = RewardModelWorker(reward_model, MicroBatching(rows=2)).score(rollouts)
    assert together == pytest.approx(
        RewardModelWorker(reward_model, MicroBatching(rows=1)).score(rollouts), rel=1e-3, abs=1e-3
    )


def test_images_are_resized_to_the_reward_models_limits(tmp_path):
    """A policy with patches of 14 and a reward model with patches of 16."""
    policy = get_encoder("qwen2_5_vl")
    reward_model = load_reward_model(vision_reward_model(tmp_path / "rm", "qwen3_vl"))
    rollouts = make_rollouts(policy, [(make_task("which colour", 1), [picture(policy, 4, 6)])], ["red"], [0])
    assert [array.shape for array in reward_model.resize_images(rollouts.prompts[0].media)] == [(128, 160, 3)]
    assert isinstance(RewardModelWorker(reward_model, BY_ROWS).score(rollouts)[0], float)


def test_a_response_that_cannot_be_read_fails_alone(tmp_path):
    reward_model = load_reward_model(vision_reward_model(tmp_path / "rm", "qwen2_5_vl"))
    rollouts = make_rollouts(
        get_encoder("qwen2_5_vl"), [(make_task("which"), [])], ["red", "<|image_pad|>", "blue"], [0, 0, 0]
    )
    found = RewardModelWorker(reward_model, BY_ROWS).score(rollouts)
    assert isinstance(found[0], float) and isinstance(found[2], float)
    assert found[1].startswith("the reward model cannot read it") and "<|image_pad|>" in found[1]


def test_a_score_that_is_no_number_is_a_failure(tmp_path):
    reward_model = load_reward_model(
        vision_reward_model(tmp_path / "rm", "qwen2_5_vl", head=torch.full((1, 64), float("nan")))
    )
    rollouts = make_rollouts(get_encoder("qwen2_5_vl"), [(make_task("which"), [])], ["red"], [0])
    assert RewardModelWorker(reward_model, BY_ROWS).score(rollouts) == ["the reward model gave nan"]


# ---------------------------------------------------------------------------------------------- what is no reward model
def test_a_causal_model_is_no_reward_model(tmp_path):
    with pytest.raises(ValueError, match=r"no reward model with one label: score\.weight is missing"):
        load_reward_model(str(make_tiny_checkpoint(tmp_path / "lm", "qwen2")))


def test_several_labels_are_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"score\.weight is missing or of another size; a reward is one number"):
        load_reward_model(text_reward_model(tmp_path / "rm", num_labels=3))


def test_a_vision_model_without_a_head_is_an_error(tmp_path):
    with pytest.raises(
        ValueError, match=r"must hold score\.weight \[1, hidden\] next to the backbone, and there is none"
    ):
        load_reward_model(str(checkpoint("qwen2_5_vl")))
    with pytest.raises(ValueError, match=r"it is \[2, 64\]"):
        load_reward_model(vision_reward_model(tmp_path / "rm", "qwen2_5_vl", head=torch.zeros(2, 64)))


def test_only_the_vocabulary_may_be_missing(tmp_path, capfd):
    """A reward model has no use for an output layer, so some are saved without one; a hole elsewhere is an error."""
    path = Path(vision_reward_model(tmp_path / "rm", "qwen2_5_vl"))
    config = json.loads((path / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    (path / "config.json").write_text(json.dumps(config))
    weights = load_file(path / "model.safetensors")
    assert not any("lm_head" in name for name in weights)
    load_reward_model(str(path))
    assert "UNEXPECTED" not in capfd.readouterr().err, "there is no warning about the head"
    hole = next(name for name in weights if name.endswith("q_proj.weight"))
    del weights[hole]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"q_proj\.weight is missing"):
        load_reward_model(str(path))


def test_a_path_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="is no checkpoint directory"):
        load_reward_model(str(tmp_path / "nowhere"))


def test_a_head_in_a_shard_is_found(tmp_path):
    path = tmp_path / "rm"
    vision_reward_model(path, "qwen2_5_vl")
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    shards = {"first.safetensors": {"score.weight": weights.pop("score.weight")}, "second.safetensors": weights}
    for name, tensors in shards.items():
        save_file(tensors, path / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: name for name, tensors in shards.items() for key in tensors}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    rollouts = make_rollouts(get_encoder("qwen2_5_vl"), [(make_task("which"), [])], ["red"], [0])
    whole = RewardModelWorker(load_reward_model(vision_reward_model(tmp_path / "whole", "qwen2_5_vl")), BY_ROWS).score(
        rollouts
    )
    assert RewardModelWorker(load_reward_model(str(path)), BY_ROWS).score(rollouts) == whole


# ------------------------------------------------------------------------------------------------------- inside a run
def settings(path, **more):
    return {"worker.reward.reward_type": "model", "worker.reward.model_path": path, **more}


def test_it_is_one_more_part_of_the_total_with_the_last_weight(tmp_path):
    path = text_reward_model(tmp_path / "rm")
    config = load_config(None, settings(path, **{
        "worker.reward.functions": ("format",),
        "worker.reward.weights": (10.0, 0.5),
        "worker.actor.fsdp.mixed_precision_dtype": "fp32",
    }))  # fmt: skip
    texts = ["<think>a</think><answer>B</answer>", "red"]
    rollouts = make_rollouts(get_encoder("qwen2"), [(make_task("which colour"), ())], texts, [0, 0])
    rewards = build_scorer(config, steps=1).submit(rollouts, step=0).result()
    scores = RewardModelWorker(load_reward_model(path), BY_ROWS).score(rollouts)
    assert list(rewards.parts) == ["format", "model"]
    assert rewards.parts["model"].tolist() == pytest.approx(scores, rel=1e-4)
    assert rewards.total.tolist() == pytest.approx([10 + 0.5 * scores[0], 0.5 * scores[1]], rel=1e-4)


def test_alone_it_is_the_total_and_unreadable_responses_fail(tmp_path):
    path = vision_reward_model(tmp_path / "rm", "qwen2_5_vl")
    config = load_config(None, settings(path, **{"worker.reward.failure_reward": -3.0}))
    rollouts = make_rollouts(get_encoder("qwen2_5_vl"), [(make_task("which"), [])], ["red", "<|video_pad|>"], [0, 0])
    rewards = build_scorer(config, steps=1).submit(rollouts, step=0).result()
    assert rewards.failed.tolist() == [False, True] and rewards.total[1] == -3.0
    assert list(rewards.parts) == ["model"] and rewards.total[0] == rewards.parts["model"][0] != 0


def test_a_function_of_the_same_name_stays_separate(tmp_path):
    def model(sample):
        return 7.0

    config = load_config(None, settings(text_reward_model(tmp_path / "rm")))
    rollouts = make_rollouts(get_encoder("qwen2"), [(make_task("which"), [])], ["red"], [0])
    parts = build_scorer(config, steps=1, rewards=[model]).submit(rollouts, step=0).result().parts
    assert list(parts) == ["model#2", "model"] and parts["model#2"].item() == 7.0 != parts["model"].item()


def test_its_settings_in_the_configuration():
    with pytest.raises(ConfigError, match=r"worker\.reward\.model_path"):
        load_config(None, {"worker.reward.reward_type": "model"})
    two = {"worker.reward.functions": ("accuracy", "format"), "worker.reward.weights": (1.0, 1.0)}
    with pytest.raises(ConfigError, match=r"2 weights .* for 3 rewards \(accuracy, format, the reward model\)"):
        load_config(None, settings("x", **two))
    load_config(None, settings("x", **{**two, "worker.reward.weights": (1.0, 1.0, 2.0)}))
    load_config(None, settings("x", **{"worker.reward.weights": (2.0,)}))


@pytest.mark.slow
def test_a_run_trains_on_it(tmp_path):
    """Two steps of `mtrl train`: the embedded model scores itself, with a random head instead of its vocabulary."""
    shutil.copytree(MODEL_DIRECTORY, tmp_path / "rm")
    weights = load_file(tmp_path / "rm" / "model.safetensors")
    hidden = AutoConfig.from_pretrained(tmp_path / "rm").get_text_config().hidden_size
    weights["score.weight"] = torch.randn(1, hidden, generator=torch.Generator().manual_seed(0))
    save_file(weights, tmp_path / "rm" / "model.safetensors", metadata={"format": "pt"})
    words = ["dataset.rollout_batch_size=4", "worker.actor.global_batch_size=4", "worker.rollout.n=4"]
    words += ["training.max_steps=2", "training.val_before_train=false", "training.val_freq=-1"]
    words += ["worker.reward.reward_type=model", f"worker.reward.model_path={tmp_path / 'rm'}"]
    words += ["worker.reward.functions=[format]", "worker.reward.weights=[1.0, 0.25]"]
    assert main(["train", *words, f"training.output_dir={tmp_path}"]) == 0
    run = tmp_path / "mtrl" / "zoo"
    steps = [row for row in read_rows(run / "metrics.jsonl") if "actor/pg_loss" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["actor/grad_norm"] > 0 and row["reward/failed"] == 0 for row in steps)
    rows = read_rows(run / "rollouts.jsonl")
    assert len({round(row["rewards"]["model"], 4) for row in rows}) > 8, "its scores differ between responses"
    for row in rows:
        assert row["reward"] == pytest.approx(row["rewards"]["format"] + 0.25 * row["rewards"]["model"], rel=1e-4)


def test_a_path_to_no_reward_model_is_reported_without_a_traceback(tmp_path, capsys):
    words = ["worker.reward.reward_type=model", f"worker.reward.model_path={checkpoint('qwen2_5_vl')}"]
    words += ["worker.reward.functions=null", "worker.reward.weights=null"]
    assert main(["train", *words, f"training.output_dir={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert "is no reward model" in said and "Traceback" not in said
