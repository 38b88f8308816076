"""`mtrl attention`: which tokens are drawn, the heat map on an image, and the whole command on the embedded model."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from helpers import fake_prompt
from PIL import Image
from tiny_models import checkpoint

from mtrl import cli
from mtrl.checkpoint.manifest import seal
from mtrl.commands.attention import MOST_DRAWN, choose_tokens, default_report_dir, find_token, split_by_image
from mtrl.embedded.embedded_rows import CONFIG_FILE, MODEL_DIRECTORY, SIZES
from mtrl.report.attention_page import AttentionSample, make_overview, write_report
from mtrl.report.heat_map import STRONGEST, ImageAttention, bleach, draw_heat_maps, heat_maps
from mtrl.types import SEGMENTS


def answered(*ratios, tokens=None, kinds=("image",)):
    """A response whose tokens have these VGRs, on 2 text and 4 image tokens."""
    vision = torch.tensor([1 / (1 + ratio / 2) for ratio in ratios])
    mass = torch.stack([1 - vision, vision], -1)[:, None].expand(-1, len(SEGMENTS), -1)
    tokens = tokens or [f"t{i}" for i in range(len(ratios))]
    return AttentionSample(
        id="t:1",
        prompt="Which?",
        response="".join(tokens),
        answer="B",
        tokens=tuple(tokens),
        mass=mass,
        prompt_mass=mass[0],
        sizes=torch.tensor([2, 4 if kinds else 0]),
        kinds=frozenset(kinds),
    )


# ------------------------------------------------------------------------------------------------------------- choosing
def test_the_extremes_and_the_answer_are_drawn():
    answer = answered(1.0, 0.25, 4.0, 2.0, tokens=["B", " red", "(", "B"])
    torch.testing.assert_close(answer.token_vgr(), torch.tensor([1.0, 0.25, 4.0, 2.0]))
    assert list(choose_tokens(answer, "B", ())) == [1, 2, 3], "the last B is the answer"
    assert list(choose_tokens(answer, None, ())) == [1, 2]
    assert choose_tokens(answered(1.0, 3.0, tokens=["A", "B"]), "B", ())[1].startswith("looks least")


def test_requested_tokens_are_drawn():
    answer = answered(1, 1, 1, 1, tokens=["the", " red", " one", "."])
    assert list(choose_tokens(answer, "A", ("red", "-1", "0", "99", "blue"))) == [1, 3, 0]
    assert len(choose_tokens(answered(*[1.0] * 50, tokens=["x"] * 50), None, ("x",))) == MOST_DRAWN
    assert find_token(["B", " (B)", "Both"], "B") == [0, 1]


# -------------------------------------------------------------------------------------------------------------- drawing
def read_pixels(figure, axes):
    """The pixels of the axes, [H, W, 3]."""
    figure.canvas.draw()
    drawn, box = np.asarray(figure.canvas.buffer_rgba())[..., :3], axes.get_window_extent()
    top, bottom = (round(len(drawn) - y) for y in (box.y1, box.y0))
    return drawn[top:bottom, round(box.x0) : round(box.x1)].astype(int)


def test_heat_is_where_the_attention_is_and_the_image_shines_through():
    image = np.full((56, 84, 3), 255, np.uint8)
    image[:, ::28] = 0  # black lines: they must be seen everywhere
    attention = torch.tensor([[0.0, 0.0, 0.2], [0.0, 0.4, 0.0]])
    figure = heat_maps("token", [ImageAttention(image, {"late": attention})], {"late": "60% on images"})
    plain, heated, scale = figure.axes
    for axes in (plain, heated):
        assert axes.get_images()[0].get_array().shape == image.shape
    drawn = read_pixels(figure, heated)
    tall, wide = len(drawn) // 2, drawn.shape[1] // 3
    middle = lambda r, c: drawn[r * tall + tall // 2, c * wide + wide // 2]  # noqa: E731
    heat = {(r, c): middle(r, c)[0] - middle(r, c)[2] for r in range(2) for c in range(3)}
    assert heat[1, 1] > heat[0, 2] > 60 and all(heat[place] == 0 for place in heat if place not in ((1, 1), (0, 2)))
    hottest = drawn[tall + 10 : -10, wide - wide // 8 : 2 * wide - wide // 8].sum(2)
    assert hottest.max() - hottest.min() > 60, "the black line shows through the strongest heat"
    assert scale.get_ylabel() == "share of the attention"
    ticks = [label.get_text() for label in scale.get_yticklabels()]
    assert ticks == ["0%", "10%", "20%", "30%", "40%"] and STRONGEST < 0.7


def test_colours_of_equal_brightness_stay_distinct():
    """Yellow on light blue vanished in an image of greys."""
    blue, yellow = bleach(np.array([[[192, 216, 240], [236, 231, 60]]], np.uint8))[0].astype(int)
    assert np.abs(blue - yellow).max() > 40


def test_all_panels_share_one_scale():
    maps = {"early": torch.full((2, 2), 0.01), "late": torch.full((2, 2), 0.3)}
    each = ImageAttention(np.zeros((56, 56, 3), np.uint8), maps)
    figure = heat_maps("token", [each, each], {"early": "a", "late": "b"})
    scales = {image.get_clim() for axes in figure.axes for image in axes.get_images() if image.get_array().ndim == 2}
    assert [(low, round(high, 6)) for low, high in scales] == [(0, 0.3)]


def test_no_attention_at_all_is_no_error(tmp_path):
    nothing = ImageAttention(np.zeros((28, 280, 3), np.uint8), {"late": torch.zeros(1, 10)})
    draw_heat_maps(tmp_path / "a.png", "token '$x_1'", [nothing], {"late": "0% on images, VGR n/a"})
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_a_panel_for_each_segment_and_a_row_for_each_image():
    maps = {name: torch.rand(2, 4) for name in SEGMENTS}
    wide = ImageAttention(np.zeros((56, 112, 3), np.uint8), maps)
    tall = ImageAttention(np.zeros((4000, 28, 3), np.uint8), maps)
    figure = heat_maps("token", [wide, tall], {"early": "10%", "late": "20%"})
    assert len(figure.axes) == 2 * 3 + 1 and figure.get_size_inches()[1] < 8, (
        "plus the scale; none is taller than a page"
    )
    figure.canvas.draw()
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    assert not any(one.overlaps(other) for place, one in enumerate(boxes) for other in boxes[place + 1 :])


def test_attention_is_cut_into_images():
    prompt = fake_prompt("p", vision_tokens=8)  # one unused, 8 image tokens, 2 of text
    media = (np.zeros((28, 56, 3), np.uint8), np.zeros((56, 84, 3), np.uint8))
    prompt = prompt.__class__(prompt.task, media, prompt.ids, prompt.engine_ids, prompt.token_pool)
    attention = torch.arange(11.0).expand(len(SEGMENTS), -1)
    first, second = split_by_image(prompt, attention, token_side=28)
    assert first.maps["late"].tolist() == [[1, 2]] and second.maps["all"].tolist() == [[3, 4, 5], [6, 7, 8]]


# --------------------------------------------------------------------------------------------------------------- report
def test_the_table_omits_responses_without_an_image(tmp_path):
    text = make_overview([answered(1.0), answered(3.0), answered(9.0, kinds=())])
    assert "3 responses, 2 with images.\n" in text
    assert text.count("| late | 2 | 1 | 1 | 3 |") == 2, "answering and reading"
    report = write_report(tmp_path, "Title", [answered(9.0, kinds=())]).read_text()
    assert "VGR n/a (no image)" in report and "place" not in report


def test_images_and_videos_are_counted_apart():
    text = make_overview([answered(1.0, kinds=["video"]), answered(3.0, kinds=["image", "video"]), answered(1.0)])
    assert "3 responses, 2 with images, 2 with videos.\n" in text


def test_long_responses_list_both_ends(tmp_path):
    report = write_report(tmp_path, "Title", [answered(*(0.1 * (i + 1) for i in range(40)))]).read_text()
    listed = [int(place) for place in re.findall(r"^\| (\d+) \| 't", report, re.MULTILINE)]
    assert listed == [*range(8), *range(32, 40)]


def test_where_the_report_goes(tmp_path):
    run = tmp_path / "run"
    step = run / "checkpoints" / "step_4"
    step.mkdir(parents=True)
    (run / "config.yaml").touch()
    assert default_report_dir(run, step) == default_report_dir(step, step) == run / "attention_step_4"
    assert str(default_report_dir(tmp_path / "model", tmp_path / "model")) == "attention_model"


# -------------------------------------------------------------------------------------------------------------- command
@pytest.fixture
def few_questions(monkeypatch):
    """The command reads all rows of its data before it draws the first."""
    for split in ("validation", "test"):
        monkeypatch.setitem(SIZES, split, 16)


@pytest.mark.slow  # 6 s
def test_the_command(tmp_path, capsys, few_questions):
    words = ["attention", str(MODEL_DIRECTORY), "--samples", "1", "--out", str(tmp_path / "out"), "--data", "zoo@test"]
    assert cli.main(words) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["samples"] == 1 and 0.2 < last["vgr_late"] < 5
    report = tmp_path / "out/report.md"
    assert last["report"] == str(report)
    text = report.read_text()
    assert text.count("## Sample") == 1 and text.count("zoo1-test:") == 1 and "Attention while reading" in text
    pictures = re.findall(r"!\[attention\]\((.*?)\)", text)
    assert len(pictures) >= 2 and len(set(pictures)) == len(pictures)
    for name in pictures:
        with Image.open(report.parent / name) as picture:
            colours = np.asarray(picture)[90:].reshape(-1, 3)
        assert len(np.unique(colours, axis=0)) > 20, "something is drawn"


def test_the_requested_tokens_are_drawn(tmp_path, few_questions):
    words = ["attention", str(MODEL_DIRECTORY), "--samples", "1", "--tokens", "0,-1", "--out", str(tmp_path)]
    assert cli.main(words) == 0
    first, last = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert first == "sample1_token0.png" and int(re.findall(r"\d+", last)[1]) > 5


def test_a_run_on_the_embedded_task_brings_its_data(tmp_path, few_questions):
    """As `mtrl eval RUN` does."""
    run = tmp_path / "run"
    shutil.copytree(MODEL_DIRECTORY, run / "checkpoints/step_1")
    (run / "checkpoints/step_1/trainer_state.json").write_text('{"step": 1}')
    seal(run / "checkpoints/step_1")
    (run / "config.yaml").write_text(CONFIG_FILE.read_text())
    for path in (run, run / "checkpoints/step_1"):
        assert cli.main(["attention", str(path), "--samples", "1", "--out", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "which model?"),
        (["m", "--samples", "0"], "--samples: 0 is no whole number of at least 1"),
        (["m", "--samples"], "--samples: expected one argument"),
        (
            [str(MODEL_DIRECTORY), "--out", "x", "worker.actor.model.attn_implementation=eager"],
            "attn_implementation auto",
        ),
        ([str(MODEL_DIRECTORY), "--data", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_mistakes_are_reported(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["attention", *words]) == cli.USER_ERROR
    assert said in capsys.readouterr().err


def test_models_and_data_without_images_are_an_error(tmp_path, capsys):
    data = tmp_path / "text.jsonl"
    data.write_text('{"prompt": "Which?", "answer": "A"}\n')
    assert cli.main(["attention", str(checkpoint("qwen2")), "--data", str(data)]) == cli.USER_ERROR
    assert "is a text model" in capsys.readouterr().err
    assert cli.main(["attention", str(MODEL_DIRECTORY), "--data", str(data)]) == cli.USER_ERROR
    assert "none of the first 1 prompts has an image" in capsys.readouterr().err
    assert cli.main(["attention", str(checkpoint("qwen2_5_vl"))]) == cli.USER_ERROR
    assert "name a file (--data F)" in capsys.readouterr().err
