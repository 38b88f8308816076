"""Prompts and images of LLaVA-OneVision beside transformers' processor: sizes, tokens, pixels, features."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import LlavaOnevisionConfig, LlavaOnevisionImageProcessorPil

from mtrl.models.backbone import Backbone
from mtrl.models.families import load_encoder, load_model_config
from mtrl.models.families.onevision import OnevisionEncoder
from mtrl.models.load_model import load_model
from mtrl.models.processors import load_processor, process_prompt
from mtrl.models.tiny_families.onevision import PATCH, PINPOINTS, SIDE
from mtrl.tracking.record import image_grid
from mtrl.types import VISION_POOL, Medium, Task
from pretraining.tiny_checkpoints import make_tiny_checkpoint

SEEN = SIDE // PATCH  # tokens of a side of a tile


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llava_onevision"))


@pytest.fixture(scope="module")
def encoder(path):
    return load_encoder(path)


@pytest.fixture(scope="module")
def processor(path):
    return load_processor(path, load_model_config(path))


def published(encoder, processor, max_pixels=None):
    """The encoder and the processor with transformers' defaults, which are those of the published models: tiles of 384
    pixels and 27 x 27 tokens, up to six in a row."""
    names = {"image_token_index": encoder._pad_ids["image"], "video_token_index": encoder.forbidden_ids[-1]}
    config = LlavaOnevisionConfig(**names)
    saved = {"size": {"height": 384, "width": 384}}
    image = OnevisionEncoder.read_image_settings(saved, config, None, max_pixels)
    options = {"num_image_tokens": 27**2, "vision_feature_select_strategy": "full"}
    theirs = type(processor)(LlavaOnevisionImageProcessorPil(), encoder.tokenizer, **options)
    return OnevisionEncoder(encoder.tokenizer, config, image), theirs


def random_sizes(count, longest):
    sizes = np.random.default_rng(0).integers(5, longest, (count, 2)).tolist()
    return [(height, width) for height, width in sizes if max(height, width) <= 200 * min(height, width)]


def picture(height, width, seed=1):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def make_task(count, words="which colour?"):
    parts = [{"type": "image"} for _ in range(count)] + [{"type": "text", "text": words}]
    return Task("t:0", "t, row 1", ({"role": "user", "content": parts},), (Medium("image", None),) * count)


def encode(encoder, *media):
    return encoder.encode(make_task(len(media)), media)


# ------------------------------------------------------------------------------------------- beside transformers' class
@pytest.mark.parametrize("sizes", ["tiny", "published"])
def test_counts_are_those_of_transformers_for_any_size(encoder, processor, sizes):
    ours, theirs = (encoder, processor) if sizes == "tiny" else published(encoder, processor)
    longest, seen = 10 * ours.side, set()
    for size in random_sizes(300, longest):
        target = ours.target_size(*size)
        expected = theirs._get_number_of_features(*size, ours.side, ours.side)
        assert ours.count_image_tokens(*target) == expected, size
        assert theirs._get_number_of_features(*target, ours.side, ours.side) == expected, size
        assert ours.target_size(*target) == target, size
        seen.add(expected)
    assert len(seen) > 30, "the number of tokens depends on the size"


def test_tokens_and_pixels_are_those_of_transformers(encoder, processor):
    """For one picture or two, at the size to which they were resized."""
    sizes = random_sizes(120, 6 * SIDE)
    for number, (first, second) in enumerate(zip(sizes, reversed(sizes), strict=True)):
        media = [picture(*encoder.target_size(*each)) for each in (first, second)[: 1 + number % 2]]
        prompt = encode(encoder, *media)
        inputs, theirs = encoder.inputs(prompt), process_prompt(processor, prompt)
        assert torch.equal(prompt.ids, theirs["input_ids"][0]), first
        assert torch.equal(inputs["image_sizes"], theirs["image_sizes"])
        torch.testing.assert_close(inputs["pixel_values"], theirs["pixel_values"], rtol=0, atol=1e-6)
        assert int((prompt.token_pool == VISION_POOL).sum()) == sum(
            encoder.count_image_tokens(*m.shape[:2]) for m in media
        )
        assert encoder.length(prompt.task, [m.shape[:2] for m in media]) == len(prompt.ids)


def test_tiles_are_those_of_the_picture_as_it_came(encoder, processor):
    """transformers makes the copy from the picture before it is resized; the tiles are the same."""
    same = 0
    for size in random_sizes(40, 6 * SIDE):
        whole, target = picture(*size), encoder.target_size(*size)
        resized = np.asarray(Image.fromarray(whole).resize(target[::-1], Image.Resampling.BICUBIC))
        theirs = torch.as_tensor(
            processor.image_processor([Image.fromarray(whole)], return_tensors="pt")["pixel_values"]
        )
        ours = encoder.pixels(resized, None)
        assert ours.shape == theirs[0].shape
        same += torch.allclose(ours[1:], theirs[0, 1:], rtol=0, atol=1e-6)
    assert same >= 36, "a size in fifty is a pixel smaller, so that it has the tokens of the whole picture"


def test_features_are_one_for_each_token(encoder, path):
    """Prompts with different numbers of tiles in one pass give what each gives alone; the largest are interpolated."""
    backbone = Backbone(load_model(path))
    sizes = [(SIDE, SIDE), (4 * SIDE, 4 * SIDE), (SIDE, 3 * SIDE - 20), (2 * SIDE - 17, SIDE), (3 * SIDE + 9, 4 * SIDE)]
    media = [picture(*encoder.target_size(*each)) for each in sizes]
    assert encoder._count_lines(*media[1].shape[:2]) == (12, 12) != encoder._count_kept(*media[1].shape[:2])
    prompts = [encode(encoder, *media[:2]), *(encode(encoder, each) for each in media[2:])]
    inputs = [encoder.inputs(prompt) for prompt in prompts]
    with torch.no_grad():
        together = backbone.encode_images(inputs)
        for prompt, each, found in zip(prompts, inputs, together, strict=True):
            (alone,) = backbone.encode_images([each])
            assert len(found.embeds) == int((prompt.token_pool == VISION_POOL).sum())
            torch.testing.assert_close(found.embeds, alone.embeds, rtol=0, atol=1e-5)


# --------------------------------------------------------------------------------------------------------- what is seen
def test_a_perturbation_shows_in_its_tile_and_in_the_copy(encoder):
    canvas = picture(2 * SIDE, 3 * SIDE)
    black = canvas.copy()
    black[SIDE:, :SIDE] = 0
    tiles, other = (encoder.visible_part(each).reshape(7, SIDE, SIDE, 3) for each in (canvas, black))
    assert (tiles[5] == canvas[SIDE:, SIDE : 2 * SIDE]).all()
    assert (other != tiles).any((1, 2, 3)).tolist() == [True, *3 * [False], True, False, False]


def test_the_image_is_in_the_centre_of_its_canvas(encoder):
    white = np.full((SIDE + 31, 2 * SIDE, 3), 255, np.uint8)
    assert encoder.target_size(*white.shape[:2]) == white.shape[:2]
    copy, *tiles = encoder.visible_part(white).reshape(-1, SIDE, SIDE, 3)
    assert len(tiles) == 4 and (copy == 255).all(), "the copy has no padding"
    columns = np.concatenate([tiles[0], tiles[2]])[:, 0, 0]
    above = (SIDE - 31) // 2
    assert (columns == np.repeat([0, 255, 0], [above, SIDE + 31, SIDE - 31 - above])).all()


def test_what_is_drawn_has_the_grids_of_the_tokens(encoder):
    thin = (3, 4 * SIDE), (4 * SIDE, 3)  # no row, and no column, of tokens is more than padding by half
    for size in [*encoder.sizes(), *(encoder.target_size(*each) for each in random_sizes(60, 6 * SIDE)), *thin]:
        drawn = encoder.pictures(picture(*size))
        assert all(each.size for each in drawn)
        cells = [image_grid(each, 1, PATCH)[:3] for each in drawn]
        assert sum(np.prod(grid) for grid in cells) == encoder.count_image_tokens(*size), size
    white = encoder.pictures(np.full((SIDE + 31, 2 * SIDE, 3), 255, np.uint8))[1]
    assert (white[:, -PATCH:] == 0).all() and white[len(white) // 2, :-PATCH].min() == 255
    assert len(white) == 6 * PATCH, "of the eight rows that the tiles have, two are padding"


# --------------------------------------------------------------------------------------------------------------- limits
def test_limits_of_pixels_leave_out_large_canvases(encoder, processor):
    """transformers, which knows no limit, takes an image that was resized so for one of the same canvas."""
    ours, theirs = published(encoder, processor, max_pixels=11 * 384**2)
    assert published(encoder, processor)[0].image_settings.max_pixels == 37 * 384**2
    for size in random_sizes(200, 4000):
        target = ours.target_size(*size)
        assert np.prod(ours.visible_size(*target)) <= 11 * 384**2
        assert theirs._get_number_of_features(*target, 384, 384) == ours.count_image_tokens(*target)
        assert ours.target_size(*target) == target
    smallest = published(encoder, processor, max_pixels=1)[0]
    assert smallest.sizes() == [(384, 384)] and smallest.image_settings.max_pixels == 2 * 384**2


def test_the_largest_image_of_so_many_tokens(encoder):
    for tokens in range(1, 220, 7):
        size = encoder.largest_image(tokens)
        assert encoder.count_image_tokens(*size) <= tokens or size == (SIDE, SIDE)
    assert encoder.largest_image(10**6) == (4 * SIDE, 4 * SIDE)


# ------------------------------------------------------------------------------------------------------------- refusals
def change_json(path, name, **changes):
    file = path / name
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("preprocessor_config.json", {"size": {"height": 64, "width": 64}}, "whole squares of the 60 pixels"),
        ("config.json", {"image_grid_pinpoints": [[60, 60], [60, 100]]}, "whole squares of the 60 pixels"),
        ("preprocessor_config.json", {"image_grid_pinpoints": PINPOINTS[:3]}, "image_grid_pinpoints of .* differ"),
        ("config.json", {"vision_aspect_ratio": "anyres"}, "vision_aspect_ratio 'anyres'"),
        ("config.json", {"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy 'default'"),
    ],
)
def test_settings_that_are_not_supported_are_refused(tmp_path, file, changes, message):
    path = make_tiny_checkpoint(tmp_path, "llava_onevision")
    change_json(path, file, **changes)
    with pytest.raises(ValueError, match=message):
        load_encoder(path)


def test_another_limit_of_tokens_gives_another_fingerprint(tmp_path, encoder):
    path = make_tiny_checkpoint(tmp_path, "llava_onevision")
    assert load_encoder(path).fingerprint() == encoder.fingerprint()
    change_json(path, "config.json", vision_aspect_ratio="anyres_max_2")
    other = load_encoder(path)
    assert other.fingerprint() != encoder.fingerprint()
    assert other.count_image_tokens(2 * SIDE, 2 * SIDE) < encoder.count_image_tokens(2 * SIDE, 2 * SIDE)


def test_videos_and_marks_in_the_text_are_refused_in_one_line(encoder):
    task = Task("t:0", "t", ({"role": "user", "content": [{"type": "video"}]},), (Medium("video", None),))
    with pytest.raises(ValueError, match="this model takes no videos"):
        encoder.encode(task, [picture(SIDE, SIDE)])
    for mark in ("<image>", "<video>"):
        with pytest.raises(ValueError, match="the text contains the media token"):
            encoder.encode(make_task(1, f"a {mark}"), [picture(SIDE, SIDE)])
