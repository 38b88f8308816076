"""Videos through our encoder and through transformers' own models: the same log-probs, and the positions of frames in
time. transformers' own video processors are tested in `tests/on_vllm`, since they need torchvision."""

import numpy as np
import pytest
import torch
from clip_helpers import mixed_prompts
from tiny_models import get_encoder, plain_model, random_rollouts, shared_backbone

from mtrl.models.forward import Forward
from mtrl.models.parity import log_prob_gap
from mtrl.protocols import Clip
from mtrl.types import Medium, Task

pytest.importorskip("av")
FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe"]
TOLERANCE = 1e-5


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_those_of_transformers_own_model(family, share_prefix, tmp_path):
    """It computes positions from grids and seconds itself: a wrong position of a frame moves log-probs by nats."""
    prompts, encoder = mixed_prompts(family, tmp_path), get_encoder(family)
    rollouts = random_rollouts(prompts, [0, 0, 1, 2, 3, 3], [4, 3, 5, 2, 6, 1])
    ours = Forward(shared_backbone(family), encoder, share_prefix=share_prefix).signals(rollouts).old_logprobs
    gap = log_prob_gap(
        ours, rollouts, plain_model(family), encoder, temperature=1.0, compute_dtype=torch.float32
    )  # fmt: skip
    assert gap.tokens == 21 and gap.largest < TOLERANCE


# -------------------------------------------------------------------------------------------------- frames and times
@pytest.mark.parametrize("family", FAMILIES)
def test_a_video_of_any_length_has_frames_to_show(family):
    encoder = get_encoder(family)
    for total in (1, 2, 3, 4, 5, 61, 1800, 100_000):
        frames = encoder.clip(total, 29.97).frames
        assert list(frames) == sorted(set(frames)) and frames[0] == 0 and frames[-1] < total and len(frames) <= 64
        assert len(frames) >= min(total // 2 * 2 or 1, 4)


def clip_prompt(encoder, clip, rows=2, columns=3):
    side = encoder.image_settings.factor
    content = [{"type": "video"}, {"type": "text", "text": "x"}]
    task = Task("t:0", "t", ({"role": "user", "content": content},), (Medium("video", None, clip),))
    pixels = np.zeros((len(clip.frames), rows * side, columns * side, 3), np.uint8)
    assert encoder.length(task, [pixels.shape[1:3]]) == len(encoder.encode(task, [pixels]).ids)
    return encoder.encode(task, [pixels])


def test_qwen3_writes_the_middle_of_the_time_of_each_patch():
    encoder = get_encoder("qwen3_vl")
    prompt = clip_prompt(encoder, Clip(100, 10.0, (0, 33, 66)))
    text = "".join(encoder.decode_tokens(prompt.ids))
    frame = "<|vision_start|>" + 6 * "<|video_pad|>" + "<|vision_end|>"
    assert f"<|vision_start|><1.6 seconds>{frame}<6.6 seconds>{frame}<|vision_end|>x" in text  # 3.3 / 2, the last alone
    assert "".join(encoder.decode_tokens(prompt.engine_ids)).count("<|video_pad|>") == 1
    seen = encoder.inputs(prompt)
    assert seen["image_grid_thw"].tolist() == [[2, 4, 6]] and int((seen["mm_token_type_ids"] == 2).sum()) == 12


def test_text_positions_continue_after_the_last_frame_of_a_long_clip():
    """The rule of Qwen, vLLM and transformers' generate: after all positions of the clip. transformers' forward
    continues after its longer side, and contradicts its own generate if the time is longer."""
    encoder = get_encoder("qwen2_5_vl")
    prompt = clip_prompt(encoder, Clip(80, 8.0, tuple(range(0, 80, 10))))  # 8 frames of 10 seconds: 2.5 s a patch
    positions = encoder.inputs(prompt)["position_ids"]
    start = prompt.ids.tolist().index(encoder._pad_ids["video"])
    assert positions[0, start : start + 24 : 6].tolist() == [start, start + 10, start + 20, start + 30]
    assert positions[:, start + 24].tolist() == 3 * [start + 31]
    assert positions[1, start : start + 6].tolist() == [start] * 3 + [start + 1] * 3
