"""Videos on the real vLLM: it sees the same frames as the trainer, at the same positions."""

import numpy as np
import pytest
import torch
from clip_helpers import mixed_prompts
from tiny_models import get_encoder, plain_model, shared_backbone
from vllm_engines import INSTALLED, MAX_LENGTH, arguments

from mtrl.models.forward import Forward
from mtrl.models.state_dicts import exported_weights
from mtrl.protocols import Clip
from mtrl.rollout.vllm.generator import VllmGenerator
from mtrl.rollout.vllm.inprocess import VllmInProcess
from mtrl.types import Medium, Sampling, Task

pytestmark = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")
pytest.importorskip("av")
FAMILIES = ["qwen2_5_vl", "qwen3_vl"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def engine(family):
    settings, images = arguments(family, limit_mm_per_prompt={})
    host = VllmInProcess(settings, images)
    yield VllmGenerator(host, get_encoder(family), exported_weights(plain_model(family)).keys())
    host.close()


def test_one_batch_of_all_kinds(family, engine, tmp_path):
    """A video row, a row of two images, a text row and one with both: the log-probs equal the trainer's."""
    prompts, encoder = mixed_prompts(family, tmp_path), get_encoder(family)
    with engine.resident():
        rollouts = engine.generate(prompts, Sampling(n=2, max_new_tokens=8))
    assert rollouts.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    expected = Forward(shared_backbone(family), encoder).signals(rollouts).old_logprobs
    torch.testing.assert_close(rollouts.rollout_logprobs, expected, atol=1e-4, rtol=0)


def test_a_long_clip_of_an_odd_number_of_frames(family, engine):
    """Where its time is longer than its sides the text goes on after the time."""
    encoder = get_encoder(family)
    side, clip = encoder.image_settings.factor, Clip(300, 29.97, tuple(range(0, 270, 30)))
    content = [{"type": "text", "text": "look"}, {"type": "video"}, {"type": "text", "text": " which colour"}]
    task = Task("t:0", "t", ({"role": "user", "content": content},), (Medium("video", None, clip),))
    pixels = np.random.default_rng(0).integers(0, 256, (9, 2 * side, 3 * side, 3), dtype=np.uint8)
    prompt = encoder.encode(task, [pixels])
    assert len(prompt.ids) < MAX_LENGTH
    with engine.resident():
        rollouts = engine.generate([prompt], Sampling(n=2, max_new_tokens=8))
    expected = Forward(shared_backbone(family), encoder).signals(rollouts).old_logprobs
    torch.testing.assert_close(rollouts.rollout_logprobs, expected, atol=1e-4, rtol=0)
