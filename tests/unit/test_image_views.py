"""Other views of an image: what they show, and by what they are keyed."""

import math
from dataclasses import replace

import numpy as np
import pytest
from tiny_models import get_encoder, prompt

from mtrl.models.perturb import Perturbation
from mtrl.models.views import EXAMPLES, ImageViews, View
from mtrl.types import Needs
from mtrl.utils.errors import RunError

ENCODER = get_encoder("qwen2_5_vl")
RANDOM = ("crop(0.5)", "noised(2)", "perturbed")
VIEWS = ImageViews(Perturbation(seed=7), ENCODER.image_settings)


def make_prompt(name="t:0", box=None, sizes=((3, 4),)):
    made = prompt(ENCODER, name, "which colour", sizes)
    return replace(made, task=replace(made.task, columns={"box": box}))


def show(view, step=2, views=VIEWS, **options):
    return views.media(view, make_prompt(**options), step)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "none"])
def test_shapes_stay(name):
    original, shown = make_prompt(box=(0.1, 0.2, 0.7, 0.9)), show(name, box=(0.1, 0.2, 0.7, 0.9))
    assert [each.shape for each in shown] == [each.shape for each in original.media]
    is_same = np.array_equal(shown[0], original.media[0])
    assert is_same == name.startswith("counterfactual"), "that view changes attention, not pixels"


@pytest.mark.parametrize("name", RANDOM)
def test_a_random_view_has_one_key(name):
    first = show(name)[0]
    assert np.array_equal(first, show(name)[0])
    others = (
        show(name, step=3),
        show(name, name="t:1"),
        show(name, views=ImageViews(Perturbation(seed=8), ENCODER.image_settings)),
    )
    assert not any(np.array_equal(first, each[0]) for each in others)


def test_noise_has_its_size_on_normalized_pixels_and_is_not_clipped():
    shown = show("noised(2)", sizes=((20, 20),))[0]
    settings = ENCODER.image_settings
    change = (shown - make_prompt(sizes=((20, 20),)).media[0]) * settings.rescale_factor / np.array(settings.image_std)
    assert change.std() == pytest.approx(2.0, rel=0.01) and abs(change.mean()) < 0.02
    assert shown.dtype == np.float32 and shown.min() < 0 and shown.max() > 255


def test_cells_have_their_mean_colour():
    medium, cell = make_prompt().media[0], 24  # the sides are no multiples of it
    height, width = medium.shape[:2]
    assert height % cell and width % cell
    shown = show(f"pixelated({cell})")[0]
    for top in range(0, height - cell, cell):
        for left in range(0, width - cell, cell):
            area = (slice(top, top + cell), slice(left, left + cell))
            mean = medium[area].reshape(-1, 3).mean(0)
            assert np.abs(shown[area].astype(float) - mean).max() <= 1


def test_a_crop_is_a_part_of_the_image():
    medium = make_prompt().media[0]
    height, width = medium.shape[:2]
    shown = show("crop(box)", box=(0.5, 0.0, 1.0, 0.5))[0]
    quarter = medium[: height // 2, width // 2 :]
    assert np.abs(shown.mean((0, 1)) - quarter.mean((0, 1))).max() < 6 < np.abs(shown.mean() - medium.max())
    whole = show("crop(box)", box=(0.0, 0.0, 1.0, 1.0))[0]
    assert np.array_equal(whole, medium)
    assert not show("black")[0].any()


def test_frames_of_a_clip_get_the_same_part_and_noise():
    made = make_prompt()
    clip = np.stack([made.media[0]] * 4)
    for name in RANDOM:
        (shown,) = VIEWS.media(name, replace(made, media=(clip,)), 1)
        assert shown.shape == clip.shape and all(np.array_equal(shown[0], frame) for frame in shown[1:])


def test_nothing_sees_the_image():
    assert show("none") is None and show("none", sizes=()) == () and show("black", sizes=()) == ()


@pytest.mark.parametrize("box", [None, "left", (0, 0, 1), (0.5, 0, 0.5, 1), (0, 0, 1, 2), (math.nan,) * 4])
def test_a_box_that_is_none(box):
    with pytest.raises(RunError, match=r"crop\(box\) needs one image and a column box"):
        show("crop(box)", box=box)
    with pytest.raises(RunError, match="it has 2 images"):
        show("crop(box)", box=(0, 0, 1, 1), sizes=((2, 2), (2, 2)))


@pytest.mark.parametrize(
    "name", ["", "blank", "none(1)", "black()", "crop", "crop(0)", "crop(1)", "noised(x)", "noised", "pixelated(1.5)"]
)
def test_names_that_are_no_views(name):
    with pytest.raises(ValueError, match=r"there are perturbed, black, pixelated\(16\)"):
        View.parse(name)


def test_needs_of_views():
    needs = Needs("kl@none", "dependency", "logprobs@noised(2)") | Needs("jsd@none", "old_logprobs")
    assert needs.other_views == ("noised(2)", "none", "perturbed") and needs.views == 4
    assert needs.of_view("none") == ("kl", "jsd") and needs.of_view("perturbed") == ()
    assert Needs("mass@none").unknown == ["mass@none"] and not needs.unknown
    assert needs.of_policy.other_views == needs.other_views and needs.of_reference.other_views == ()
