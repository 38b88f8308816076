"""Clips through our encoder and through transformers' own processors and models: the same frames, tokens, pixels and
log-probs. Its video processors want torchvision, which is there where vLLM is."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from clip_helpers import tiny_film
from tiny_models import checkpoint, get_encoder, plain_model, random_rollouts, shared_backbone
from transformers.video_utils import VideoMetadata, load_video

from mtrl.data import DataSettings, RowList, Sampler, open_dataset
from mtrl.models.forward import Forward
from mtrl.models.parity import plain_inputs
from mtrl.protocols import VideoSettings

pytest.importorskip("av")
pytest.importorskip("torchvision")
FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
TOLERANCE = 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_log_probs_equal_those_of_transformers_processor(family, tmp_path):
    """The processor reads the file and produces the same frames, marks, pads, times and pixels."""
    processor = make_processor(family)
    encoder, model = get_encoder(family), plain_model(family)
    tiny_film(encoder, tmp_path / "a.mp4")
    content = [{"type": "text", "text": "is"}, {"type": "video"}, {"type": "text", "text": " red"}]
    choose = partial(processor.video_processor.sample_frames, fps=2.0)
    frames, metadata = load_video(str(tmp_path / "a.mp4"), backend="pyav", sample_indices_fn=choose)
    theirs = processor(
        text=[encoder.render([{"role": "user", "content": content}])],
        videos=[frames],
        video_metadata=[metadata],
        do_resize=False,
        do_sample_frames=False,
        return_tensors="pt",
    )
    row = {"prompt": "is<video> red", "videos": str(tmp_path / "a.mp4")}
    dataset = open_dataset([RowList([row], "rows")], DataSettings(), encoder)
    with Sampler(dataset, encoder) as sampler:
        (prompt,) = sampler.take(1)
    assert theirs["input_ids"][0].tolist() == prompt.ids.tolist()
    response = torch.tensor([30, 31, 32, 33])
    ours = plain_inputs(encoder.inputs(prompt), prompt, response)
    assert theirs["video_grid_thw"].tolist() == ours["video_grid_thw"].tolist()
    torch.testing.assert_close(theirs["pixel_values_videos"], ours["pixel_values_videos"], atol=1e-6, rtol=0)
    full = {name: torch.cat([theirs[name][0], extra])[None] for name, extra in extended(response).items()}
    with torch.no_grad():
        logits = model(**{**theirs, **full}).logits[0, -5:-1]
    logits[:, list(encoder.forbidden_ids)] = -torch.inf
    expected = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
    rollouts = random_rollouts([prompt], [0], [4])
    rollouts.tokens[0] = response
    found = Forward(shared_backbone(family), encoder).signals(rollouts).old_logprobs[0]
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def extended(response):
    zeros = torch.zeros_like(response)
    return {"input_ids": response, "attention_mask": zeros + 1, "mm_token_type_ids": zeros}


def make_processor(family):
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    whole = {"qwen2_vl": Qwen2VLProcessor, "qwen2_5_vl": Qwen2_5_VLProcessor, "qwen3_vl": Qwen3VLProcessor}[family]
    videos = Qwen3VLVideoProcessor if family == "qwen3_vl" else Qwen2VLVideoProcessor
    images = Qwen2VLImageProcessorPil.from_pretrained(checkpoint(family))
    return whole(images, get_encoder(family).tokenizer, videos.from_pretrained(checkpoint(family)))


@pytest.mark.parametrize("total", [1, 2, 3, 7, 20, 61, 100, 301, 1800])
@pytest.mark.parametrize(("fps", "wanted", "most"), [(8.0, 2.0, 64), (29.97, 2.0, 16), (25.0, 0.5, 5), (10.0, 30.0, 8)])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_frames_are_those_that_the_processor_takes(family, total, fps, wanted, most):
    encoder = with_video(family, VideoSettings(wanted, most))
    clip = encoder.clip(total, fps)
    assert clip.total == total and clip.fps == fps and 1 <= len(clip.frames) <= min(total, most)
    assert clip.frames == tuple(sorted(set(clip.frames))) and clip.frames[0] >= 0 and clip.frames[-1] < total
    videos = make_processor(family).video_processor
    videos.max_frames = most
    if family == "qwen2_5_vl" and min(total, most) < 2:
        return  # theirs divides by zero
    # theirs may have one too many
    theirs = videos.sample_frames(VideoMetadata(total_num_frames=total, fps=fps), fps=wanted)
    assert clip.frames == tuple(each for each in np.asarray(theirs).tolist() if each < total)


def with_video(family, settings):
    encoder = copy.copy(get_encoder(family))
    encoder.video_settings = settings
    return encoder
