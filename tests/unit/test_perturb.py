"""Perturbed views of images (SPEC 1.1)."""

import numpy as np
import pytest

from mtrl.models.perturb import PERTURBATIONS, Perturbation
from mtrl.types import Medium, Prompt, Task

KINDS = ["random_patch_blackening", "gaussian_noise", "gaussian_blur", "blank"]


def prompt(*media, name="3f9a:0"):
    kinds = tuple(Medium("video" if medium.ndim == 4 else "image", None) for medium in media)
    return Prompt(Task(name, name, (), media=kinds), media, *[None] * 3)


def image(height=56, width=84, seed=0):
    """No pixel is black, so that masked pixels are recognizable."""
    return np.random.default_rng(seed).integers(1, 256, (height, width, 3), dtype=np.uint8)


def clip(frames=3, height=28, width=42):
    return np.stack([image(height, width, seed) for seed in range(frames)])


def black(view):
    """[H, W]: pixels with all channels 0."""
    return (view == 0).all(-1)


# ------------------------------------------------------------------------------------------------------ blackening
def test_squares_of_the_grid_turn_black_or_stay():
    original = image()
    (view,) = Perturbation(patch_size=14).view(prompt(original), 0)
    squares = black(view).reshape(4, 14, 6, 14).swapaxes(1, 2).reshape(24, -1)
    assert {all(square) or not any(square) for square in squares} == {True}
    assert 0 < squares.all(1).sum() < 24
    assert np.array_equal(view[~black(view)], original[~black(view)])


def test_the_grid_starts_at_the_corner_and_edge_squares_are_cut():
    """14-pixel squares on 32 x 20 pixels: rows 0-13, 14-27, 28-31 and columns 0-13, 14-19."""
    seen = set()
    for step in range(40):
        (view,) = Perturbation(patch_size=14).view(prompt(image(32, 20)), step)
        dark = black(view)
        for rows in (slice(0, 14), slice(14, 28), slice(28, 32)):
            for columns in (slice(0, 14), slice(14, 20)):
                square = dark[rows, columns]
                assert square.all() or not square.any()
                seen.add((rows.start, columns.start, bool(square.all())))
    assert len(seen) == 12  # every square was black once and was not once


@pytest.mark.parametrize("size", [1, 3, 200])
def test_any_patch_size(size):
    """Down to single pixels, up to one square larger than the image."""
    views = [Perturbation(patch_size=size).view(prompt(image()), step)[0] for step in range(20)]
    shares = [black(view).mean() for view in views]
    assert set(shares) == {0.0, 1.0} if size == 200 else 0.4 < np.mean(shares) < 0.6


@pytest.mark.parametrize("probability", [0.0, 0.2, 0.5, 1.0])
def test_probability_of_a_square(probability):
    """1,200 squares of 100 steps: four standard errors."""
    settings = Perturbation(black_prob=probability)
    share = np.mean([black(settings.view(prompt(image(42, 56)), step)[0]).mean() for step in range(100)])
    assert abs(share - probability) <= 4 * (probability * (1 - probability) / 1200) ** 0.5


def test_squares_are_independent():
    """Neighbours agree half of the time, in both directions."""
    views = [black(Perturbation().view(prompt(image(140, 140)), step)[0])[::14, ::14] for step in range(50)]
    squares = np.stack(views)
    assert abs((squares[:, 1:] == squares[:, :-1]).mean() - 0.5) < 0.04
    assert abs((squares[:, :, 1:] == squares[:, :, :-1]).mean() - 0.5) < 0.04


# --------------------------------------------------------------------------------------------------------- the key
@pytest.mark.parametrize("kind", ["random_patch_blackening", "gaussian_noise"])
def test_keyed_by_seed_step_and_task(kind):
    def view(seed=1, step=5, name="3f9a:0"):
        return Perturbation(kind, seed=seed).view(prompt(image(), name=name), step)[0]

    assert np.array_equal(view(), view())
    for other in (view(seed=2), view(step=6), view(name="3f9a:1")):
        assert not np.array_equal(view(), other)


def test_independent_of_earlier_draws():
    settings = Perturbation()
    alone = settings.view(prompt(image()), 3)[0]
    for name in ("a", "b"):
        settings.view(prompt(image(), name=name), 3)
    np.random.seed(0)
    assert np.array_equal(settings.view(prompt(image()), 3)[0], alone)


def test_the_mask_does_not_depend_on_the_pixels():
    """So the responses of a group, and a resumed run, compare the same hidden squares."""
    one, other = (Perturbation().view(prompt(image(seed=seed)), 3)[0] for seed in (0, 1))
    assert np.array_equal(black(one), black(other))


# ------------------------------------------------------------------------------------------------ several and clips
@pytest.mark.parametrize("kind", KINDS)
def test_every_image_of_a_prompt_is_perturbed(kind):
    originals = [image(28, 42), image(56, 56), image(56, 56)]
    views = Perturbation(kind).view(prompt(*originals), 0)
    assert len(views) == 3
    assert not any(np.array_equal(view, original) for view, original in zip(views, originals, strict=True))


def test_images_of_a_prompt_get_different_masks():
    first, second = Perturbation().view(prompt(image(140, 140), image(140, 140)), 0)
    assert not np.array_equal(first, second)


def test_one_mask_for_all_frames_of_a_clip():
    views = [Perturbation().view(prompt(clip()), step)[0] for step in range(20)]
    assert all(np.array_equal(black(view[0]), black(frame)) for view in views for frame in view[1:])
    assert {bool(black(view).any()) for view in views} == {True}


def test_one_noise_for_all_frames_of_a_clip():
    """Averaging over frames must not bring the picture back."""
    grey = np.full((4, 28, 28, 3), 128, dtype=np.uint8)
    (view,) = Perturbation("gaussian_noise").view(prompt(grey), 0)
    assert all(np.array_equal(view[0], frame) for frame in view)


def test_no_media_no_view():
    assert Perturbation().view(prompt(), 0) == ()


# ------------------------------------------------------------------------------------------------------ other kinds
def test_noise_has_its_strength():
    """On mid-grey, where 20 is hardly ever cut at 0 or 255; and 189 nearly destroys the picture."""
    grey = np.full((112, 112, 3), 128, dtype=np.uint8)
    (view,) = Perturbation("gaussian_noise", noise_std=20).view(prompt(grey), 0)
    assert abs(view.astype(float).std() - 20) < 0.5
    assert abs(view.astype(float).mean() - 128) < 1
    (strong,) = Perturbation("gaussian_noise").view(prompt(grey), 0)
    assert 0.4 < np.isin(strong, (0, 255)).mean() < 0.6  # P(|noise| > 128 of 189) = 0.5
    assert np.array_equal(Perturbation("gaussian_noise", noise_std=0).view(prompt(grey), 0)[0], grey)


def test_blur_smooths_and_spares_flat_pictures():
    original = image(112, 112)
    weak, strong = (Perturbation("gaussian_blur", blur_radius=r).view(prompt(original), 0)[0] for r in (1, 6))
    assert strong.std() < weak.std() < original.std()
    flat = np.full((28, 28, 3), 77, dtype=np.uint8)
    assert np.array_equal(Perturbation("gaussian_blur").view(prompt(flat), 0)[0], flat)


def test_blur_does_not_mix_frames():
    black_and_white = np.stack([np.zeros((28, 28, 3), np.uint8), np.full((28, 28, 3), 255, np.uint8)])
    (view,) = Perturbation("gaussian_blur").view(prompt(black_and_white), 0)
    assert np.array_equal(view, black_and_white)


def test_blank_contains_no_information():
    one, other = (Perturbation("blank").view(prompt(image(seed=seed)), 0)[0] for seed in (0, 1))
    assert np.array_equal(one, other)
    assert len(np.unique(one)) == 1 and 120 <= one[0, 0, 0] <= 135


# ---------------------------------------------------------------------------------------------------- all the kinds
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("medium", [image(), image(30, 47), clip()], ids=["image", "odd image", "clip"])
def test_shape_and_dtype_are_kept_and_the_original_too(kind, medium):
    before = medium.copy()
    (view,) = Perturbation(kind).view(prompt(medium), 0)
    assert view.shape == medium.shape and view.dtype == np.uint8
    assert np.array_equal(medium, before)
    assert medium.flags.writeable and not np.shares_memory(view, medium)


# ---------------------------------------------------------------------------------------------------------- registry
@pytest.fixture
def own_kind():
    yield "mine"
    PERTURBATIONS.pop("mine", None)


def test_a_user_adds_a_kind(own_kind):
    def mirrored(frames, random, settings):
        assert frames.ndim == 4 and 0 <= random.random() < 1 and settings.blur_radius == 2
        return frames[:, :, ::-1]

    PERTURBATIONS[own_kind] = mirrored
    original = image()
    (view,) = Perturbation(own_kind, blur_radius=2).view(prompt(original), 0)
    assert np.array_equal(view, original[:, ::-1])


def test_a_kind_of_the_user_cannot_change_the_prompt(own_kind):
    def careless(frames, random, settings):
        frames[:] = 0
        return frames

    PERTURBATIONS[own_kind] = careless
    original = image()
    with pytest.raises(ValueError, match="read-only"):
        Perturbation(own_kind).view(prompt(original), 0)
    assert not black(original).any()


def test_an_unknown_kind_is_an_error_with_the_known_names():
    with pytest.raises(ValueError, match=r"'black_squares'.*blank.*gaussian_blur.*random_patch_blackening"):
        Perturbation("black_squares")
