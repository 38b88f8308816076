"""Videos in rows: their frames and frame sizes, and which videos are errors."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from clip_helpers import film, film_bytes
from PIL import Image
from tiny_models import checkpoint, get_encoder

from mtrl.data import DataError, DataSettings, RowList, Sampler, open_dataset
from mtrl.data.media import make_medium
from mtrl.data.row_settings import RowError
from mtrl.data.video import check_pixels, decode_medium, measure_media, read_video_info
from mtrl.models.families import load_encoder
from mtrl.protocols import Clip, VideoSettings
from mtrl.report.data_page import run as report
from mtrl.types import Medium, Task

av = pytest.importorskip("av")
FRAMES, FPS = 20, 8
PIXELS = film(112, 168, FRAMES)


@pytest.fixture(scope="module")
def data():
    """The header is before the frames, so that half a file can be opened."""
    return film_bytes(PIXELS, FPS, movflags="faststart")


def encoder_with(**video):
    return load_encoder(checkpoint("qwen2_5_vl"), video=VideoSettings(**video))


def loaded(rows, encoder, **settings):
    dataset = open_dataset([RowList(rows, "rows")], DataSettings(**settings), encoder, workers=1)
    with Sampler(dataset, encoder, shuffle=False) as sampler:
        return sampler.take(len(dataset))


# ------------------------------------------------------------------------------------------------------- what is read
KINDS = [("mp4", "libx264"), ("mp4", "mpeg4"), ("matroska", "libx264"), ("webm", "libvpx-vp9"), ("avi", "mpeg4")]


@pytest.mark.parametrize(("kind", "codec"), KINDS)
def test_films_of_every_kind(kind, codec):
    medium = Medium("video", film_bytes(PIXELS, FPS, kind, codec))
    found = read_video_info(medium)
    assert found.size == (112, 168) and found.frames == FRAMES and found.fps == pytest.approx(FPS)
    shown = decode_medium(Medium("video", medium.source, Clip(FRAMES, FPS, (0, 7, 19))), (112, 168))
    assert shown.shape == (3, 112, 168, 3) and shown.dtype == np.uint8
    assert np.abs(shown.astype(int) - PIXELS[[0, 7, 19]]).mean() < 12, "those frames, up to the codec's loss"
    assert np.abs(shown[1].astype(int) - PIXELS[6]).mean() > 2 * np.abs(shown[1].astype(int) - PIXELS[7]).mean()


def test_a_value_is_a_path_or_bytes_however_it_is_nested(tmp_path, data):
    (tmp_path / "a.mp4").write_bytes(data)
    url = f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
    for value in (
        "a.mp4",
        tmp_path / "a.mp4",
        data,
        url,
        {"bytes": data},
        {"path": "a.mp4", "bytes": None},
        {"video": "a.mp4"},
    ):
        assert read_video_info(make_medium(value, tmp_path, "video")).frames == FRAMES


def test_a_rotated_film_is_turned_upright():
    """As phones write them: the size of the scan is the size that is decoded."""
    medium = Medium("video", film_bytes(PIXELS, FPS, rotation=90))
    found = read_video_info(medium)
    shown = decode_medium(Medium("video", medium.source, Clip(FRAMES, FPS, (0,))), found.size)
    assert found.size == (168, 112) and shown.shape == (1, 168, 112, 3)
    assert np.abs(shown[0].astype(int) - np.rot90(PIXELS[0])).mean() < 12


def test_media_keep_the_order_of_their_marks(tmp_path, data):
    encoder = encoder_with()
    picture = io.BytesIO()
    Image.fromarray(PIXELS[0]).save(picture, "PNG")
    row = {"prompt": "<video>a<image>b<video>", "videos": [data, data], "images": [picture.getvalue()]}
    (prompt,) = loaded([row], encoder)
    assert [medium.kind for medium in prompt.task.media] == ["video", "image", "video"]
    assert [each.ndim for each in prompt.media] == [4, 3, 4]
    (first,) = loaded([{**row, "prompt": "no marks"}], encoder)
    assert [medium.kind for medium in first.task.media] == ["image", "video", "video"], "images come first"
    (alone,) = loaded([{"prompt": "which", "video": {"bytes": data, "path": None}}], encoder)
    assert alone.media[0].shape == (4, 112, 168, 3), "the neighbours' column is taken for ours"


# ----------------------------------------------------------------------------------------------------- what is refused
def test_a_broken_clip_is_a_bad_row_with_a_reason(tmp_path, data):
    broken = {
        "empty.mp4": (b"", "is empty"),
        "text.mp4": (b"no video at all" * 9, "cannot be read as a video"),
        "half.mp4": (data[: len(data) // 2], "is truncated or damaged"),
        "list.m3u8": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n", "cannot be read as a video"),
        "sound.wav": (sound(), "cannot be read as a video"),
        "gone.mp4": (None, "does not exist"),
    }
    rows = [{"prompt": "<video>fine", "videos": data}]
    for name, (content, reason) in broken.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(RowError, match=f"the video .*{name} {reason}"):
            check_pixels(measure_media(task_with(str(tmp_path / name)), get_encoder("qwen2_5_vl"))[0].media)
        rows.append({"prompt": "<video>broken", "videos": str(tmp_path / name)})
    with pytest.raises(DataError, match=r"6 of 7 rows cannot be used:(.|\n)*row 2: the video .*empty\.mp4 is empty"):
        loaded(rows, encoder_with())
    assert len(loaded(rows, encoder_with(), on_bad_row="skip")) == 1


def sound():
    data = io.BytesIO()
    with av.open(data, "w", format="wav") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
    return data.getvalue()


def task_with(source):
    return Task("t:0", "t", ({"role": "user", "content": [{"type": "video"}]},), (Medium("video", source),))


def test_frames_that_disappear_later_are_a_bad_row(tmp_path, data):
    """The file is truncated after the scan: the run continues with the other rows."""
    place = tmp_path / "a.mp4"
    place.write_bytes(data)
    rows = [{"prompt": "<video>a", "videos": str(place)}, *3 * [{"prompt": "b"}]]
    encoder = encoder_with()
    dataset = open_dataset([RowList(rows, "rows")], DataSettings(), encoder, workers=1)
    place.write_bytes(data[: len(data) // 2])
    with Sampler(dataset, encoder, shuffle=False) as sampler:
        assert [prompt.task.text for prompt in sampler.take(3)] == ["b"] * 3
        assert sampler.metrics() == {"data/skipped_rows": 1.0}


def test_a_header_that_counts_a_frame_too_many_is_forgiven(data):
    shown = decode_medium(Medium("video", data, Clip(FRAMES + 1, FPS, (0, 10, FRAMES))), (56, 84))
    assert len(shown) == 3
    with pytest.raises(RowError, match="ends after 20 frames"):
        decode_medium(Medium("video", data, Clip(90, FPS, (0, 45, 89))), (56, 84))


def test_without_pyav_the_error_names_the_package(monkeypatch, data):
    monkeypatch.setattr("mtrl.data.video.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install 'mtrl\[video\]'"):
        loaded([{"prompt": "<video>a", "videos": data}], encoder_with())


def test_the_row_is_an_error_for_a_text_model(data):
    with pytest.raises(DataError, match="it has a video: this model takes no videos"):
        loaded([{"prompt": "<video>a", "videos": data}], get_encoder("qwen2"))


# --------------------------------------------------------------------------------------------------------------- limits
@pytest.mark.parametrize(
    ("video", "settings", "shape"),
    [
        ({}, {}, (4, 112, 168, 3)),
        ({"video_fps": 4.0}, {}, (10, 112, 168, 3)),
        ({"video_fps": 4.0, "video_max_frames": 6}, {}, (6, 112, 168, 3)),
        ({"video_max_pixels": 28 * 28 * 8}, {}, (4, 56, 84, 3)),
        ({}, {"max_image_side": 84}, (4, 56, 84, 3)),
    ],
)
def test_limits_of_frames(video, settings, shape, data):
    (prompt,) = loaded([{"prompt": "<video>a", "videos": data}], encoder_with(**video), **settings)
    assert prompt.media[0].shape == shape


def test_limits_leave_rows_out(data, caplog):
    rows = [{"prompt": "<video>a", "videos": data}, {"prompt": "b"}]
    assert [p.task.text for p in loaded(rows, encoder_with(), max_image_side=84, big_images="filter")] == ["b"]
    assert [p.task.text for p in loaded(rows, encoder_with(), max_prompt_length=50)] == ["b"], "2 x 24 tokens and words"


def test_large_frames_are_reduced_to_768_tokens_and_small_ones_are_not_made_images():
    encoder = load_encoder(checkpoint("qwen2_5_vl"), min_pixels=262144, max_pixels=4194304)
    for size, low, high in (((1080, 1920), 600, 768), ((56, 56), 128, 160)):
        height, width = encoder.frame_size(*size)
        assert low <= height * width // 28**2 <= high


def test_the_report_counts_videos_and_shows_their_pads(tmp_path, data):
    out = io.StringIO()
    rows = [{"prompt": "<video>what", "videos": data, "answer": "x"}, {"prompt": "how", "answer": "y"}]
    assert report([RowList(rows, "rows")], DataSettings(), get_encoder("qwen3_vl"), out, cache_dir=Path(tmp_path)) == 0
    said = out.getvalue()
    assert (
        "Videos\n  1 in 1 rows\n  width   min 168" in said
        and "frames shown  min 5" in said
        and "Images\n  none" in said
    )
    assert "<0.3 seconds><|vision_start|><|video_pad|> × 20<|vision_end|>" in said


def test_the_report_counts_images_and_videos_apart(tmp_path, data):
    def said(rows, **settings):
        out = io.StringIO()
        report([RowList(rows, "rows")], DataSettings(**settings), get_encoder("qwen3_vl"), out, cache_dir=tmp_path)
        return out.getvalue()

    image = Image.fromarray(PIXELS[0][:, :100])
    both = {"prompt": "<video>or<image>", "videos": data, "images": image}
    text = said([both, {"prompt": "<video>what", "videos": data}])
    assert "Images\n  1 in 1 rows" in text and "Videos\n  2 in 2 rows" in text
    assert "need a vision-language model" not in text, "there is one"
    text = said([both, {"prompt": "how"}], max_image_side=150, big_images="filter")
    assert "        1  left out: a video over dataset.max_image_side=150" in text and "an image over" not in text
