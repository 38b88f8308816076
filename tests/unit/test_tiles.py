"""Images that are cut into tiles (InternVL, Idefics3, SmolVLM), beside transformers' processors of these families."""

import json
from functools import lru_cache

import numpy as np
import pytest
import torch
from PIL import Image

from mtrl.models.backbone import Backbone
from mtrl.models.families import load_encoder, load_model_config
from mtrl.models.families.tiles import shrink
from mtrl.models.load_model import load_model
from mtrl.models.processors import load_processor
from mtrl.tracking.record import image_grid
from mtrl.types import VISION_POOL, Medium, Task
from pretraining.tiny_checkpoints import make_tiny_checkpoint

SIDE = 56
SQUARE = {"height": SIDE, "width": SIDE}
OPTIONS = {"internvl": {"patch_size": SQUARE, "crop_to_patches": True}, "idefics3": {}}
TILED = list(OPTIONS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    return lru_cache(lambda family: make_tiny_checkpoint(root / family, family))


def random_sizes(count, longest=900):
    random = np.random.default_rng(0)
    sizes = random.integers(8, longest, (count, 2)).tolist()
    return [(height, width) for height, width in sizes if max(height, width) < 200 * min(height, width)]


def picture(height, width):
    return np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encode(encoder, *media, words="which colour?"):
    parts = [{"type": "image"} for _ in media] + [{"type": "text", "text": words}]
    task = Task("t:0", "t, row 1", ({"role": "user", "content": parts},), (Medium("image", None),) * len(media))
    return encoder.encode(task, media)


@pytest.mark.parametrize("family", TILED)
def test_grids_are_those_of_transformers(checkpoint, family):
    path = str(checkpoint(family))
    encoder, images = load_encoder(path), load_processor(path, load_model_config(path)).image_processor
    seen = set()
    for size in random_sizes(400):
        found = images.get_number_of_image_patches(*size, OPTIONS[family])
        target = encoder.target_size(*size)
        squares = max(1, found if family == "internvl" else found[0])
        assert encoder.visible_size(*target) == (squares * SIDE, SIDE), size
        if family == "idefics3" and found[0]:
            assert target == (found[1] * SIDE, found[2] * SIDE), size
        assert encoder.target_size(*target) == target
        assert {target, target[::-1]} & {*encoder.sizes()}
        seen.add(target)
    assert len(seen) > 4


@pytest.mark.parametrize("family", TILED)
def test_the_tower_reads_tiles_row_by_row_and_a_copy_of_what_is_shown(checkpoint, family):
    encoder = load_encoder(checkpoint(family))
    canvas = picture(2 * SIDE, 3 * SIDE)
    column = encoder.visible_part(canvas)
    tiles = column.reshape(7, SIDE, SIDE, 3)
    assert (tiles[4] == canvas[SIDE:, SIDE : 2 * SIDE]).all()
    black = canvas.copy()
    black[:SIDE, :SIDE] = 0
    other = encoder.visible_part(black).reshape(7, SIDE, SIDE, 3)
    changed = (other != tiles).any((1, 2, 3)).tolist()
    assert changed == [True, *5 * [False], True], "a perturbation of one tile shows in it and in the copy alone"
    single = picture(SIDE, SIDE)
    assert encoder.visible_part(single) is not single and (encoder.visible_part(single) == single).all()


@pytest.mark.parametrize("family", TILED)
def test_a_map_over_the_tokens_is_a_map_over_what_is_drawn(checkpoint, family):
    encoder = load_encoder(checkpoint(family))
    for size in encoder.sizes():
        prompt = encode(encoder, canvas := picture(*size))
        tokens = int((prompt.token_pool == VISION_POOL).sum())
        frames, rows, columns, _ = image_grid(*encoder.pictures(canvas), 1, encoder.image_settings.factor)
        assert frames * rows * columns == tokens == encoder.count_image_tokens(*size)
        assert encoder.length(prompt.task, [size]) == len(prompt.ids)


def test_values_that_are_no_bytes_are_not_clipped():
    image = picture(3 * SIDE, 2 * SIDE)
    small = shrink(image, SIDE, Image.Resampling.BICUBIC)
    smooth = shrink(image.astype(np.float32), SIDE, Image.Resampling.BICUBIC)
    assert small.dtype == np.uint8 and smooth.dtype == np.float32 and np.abs(smooth.clip(0, 255) - small).max() < 2
    brighter = shrink(image.astype(np.float32) + 400, SIDE, Image.Resampling.BICUBIC)
    assert brighter == pytest.approx(smooth + 400, abs=1e-2)


@pytest.mark.parametrize("family", [*TILED, "gemma3", "llava_onevision"])
def test_a_rank_without_images_encodes_a_blank_one(checkpoint, family):
    """A sharded tower runs on all ranks or on none."""
    backbone = Backbone(load_model(checkpoint(family)))
    features = backbone.encode_blank_image()
    assert features.embeds.shape == (0, 64) and features.embeds.requires_grad


def test_a_blank_image_does_not_vanish(checkpoint):
    """transformers drops tiles whose values are all 0, which it takes for padding, and keeps one if all are."""
    path = checkpoint("smolvlm")
    encoder, backbone = load_encoder(path), Backbone(load_model(path))
    grey = np.full((SIDE, 2 * SIDE, 3), 127.5, np.float32)
    inputs = encoder.inputs(encode(encoder, picture(SIDE, 2 * SIDE)), [grey])
    assert inputs["pixel_values"].shape == (1, 3, 3, SIDE, SIDE) and not inputs["pixel_values"].any()
    with torch.no_grad():
        (features,) = backbone.encode_images([inputs])
        theirs = backbone.model.model.get_image_features(inputs["pixel_values"], return_dict=True).pooler_output
    assert len(features.embeds) == 3 * theirs[0].shape[0] and len(theirs) == 1
    torch.testing.assert_close(features.embeds.unflatten(0, (3, -1)), theirs.expand(3, -1, -1))


# -------------------------------------------------------------------------------------------------------------- limits
@pytest.mark.parametrize("family", TILED)
@pytest.mark.parametrize("squares", [1, 2, 3, 5, 7, 10])
def test_no_image_has_more_pixels_than_the_limit(checkpoint, family, squares):
    encoder = load_encoder(checkpoint(family), max_pixels=squares * SIDE**2)
    largest = max(np.prod(encoder.visible_size(*encoder.target_size(*size))) for size in random_sizes(60))
    assert SIDE**2 <= largest <= squares * SIDE**2
    unlimited = encoder.largest_image(10**6)
    most = np.prod(encoder.visible_size(*unlimited))
    assert most == largest or family == "idefics3"
    assert most <= encoder.image_settings.max_pixels <= squares * SIDE**2
    assert squares == 2 or most == encoder.image_settings.max_pixels, "two squares are no grid with its copy"


def test_a_lower_limit_asks_for_more_tiles(checkpoint):
    encoder = load_encoder(checkpoint("internvl"), min_pixels=5 * SIDE**2)
    assert encoder.target_size(SIDE, SIDE) == (2 * SIDE, 2 * SIDE)
    between = load_encoder(checkpoint("internvl"), min_pixels=2 * SIDE**2, max_pixels=2 * SIDE**2)
    assert between.sizes() == [(SIDE, SIDE)], "no grid has two squares"


@pytest.mark.parametrize("family", TILED)
def test_the_largest_image_of_so_many_tokens(checkpoint, family):
    encoder = load_encoder(checkpoint(family))
    for tokens in range(1, 70):
        size = encoder.largest_image(tokens)
        assert encoder.count_image_tokens(*size) <= tokens or size == encoder.sizes()[0]


def test_images_are_whole_without_splitting(checkpoint, tmp_path):
    path = make_tiny_checkpoint(tmp_path, "idefics3")
    change_settings(path, do_image_splitting=False)
    encoder = load_encoder(path)
    assert encoder.target_size(300, 500) == (SIDE, SIDE) and encoder.sizes() == [(SIDE, SIDE)]


# ------------------------------------------------------------------------------------------------------------ refusals
def change_settings(path, **changes):
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("internvl", {"size": {"height": 64, "width": 64}}),
        ("internvl", {"size": {"shortest_edge": SIDE}}),
        ("idefics3", {"max_image_size": {"longest_edge": 64}}),
        ("idefics3", {"size": {"longest_edge": 100}}),
        ("idefics3", {"size": {"longest_edge": 7 * SIDE}}),
        ("idefics3", {"size": {"height": SIDE, "width": SIDE}}),
    ],
)
def test_settings_that_do_not_fit_the_tower_are_refused(tmp_path, family, changes):
    path = make_tiny_checkpoint(tmp_path, family)
    change_settings(path, **changes)
    with pytest.raises(ValueError, match=f"the vision tower takes( squares of {SIDE}|, and an image 1 to 6)"):
        load_encoder(path)


@pytest.mark.parametrize(
    ("family", "words"), [("internvl", "<IMG_CONTEXT>"), ("internvl", "a </img>"), ("idefics3", "<row_1_col_2>")]
)
def test_text_with_a_mark_of_images_is_refused(checkpoint, family, words):
    with pytest.raises(ValueError, match="the text contains the media token"):
        encode(load_encoder(checkpoint(family)), words=words)


@pytest.mark.parametrize("family", TILED)
def test_videos_are_refused_in_one_line(checkpoint, family):
    task = Task("t:0", "t", ({"role": "user", "content": [{"type": "video"}]},), (Medium("video", None),))
    with pytest.raises(ValueError, match="this model takes no videos"):
        load_encoder(checkpoint(family)).encode(task, [picture(SIDE, SIDE)])
