"""A new user's files: for every file and every format of docs/data.md the pixels arrive in the model's input; what is
malformed is refused with file, row and what to do."""

import base64
import re
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_helpers import FakeEncoder, write_jsonl
from test_data_formats import (
    FORMATS,
    QUESTIONS,
    add,
    asked,
    easyr1,
    png,
    saved_to_disk,
    sharegpt,
    trl,
    verl,
    webdataset,
)

from mtrl.compose.policy import build_encoder
from mtrl.compose.task_source import open_data_sources
from mtrl.config import load_config
from mtrl.data import DataError, DataSettings, Sampler, open_dataset
from mtrl.embedded.embedded_rows import CONFIG_FILE
from mtrl.types import VISION_POOL

DOCS = Path(__file__).parents[2] / "docs" / "data.md"
OWN = [{"prompt": asked(each), "answer": each["answer"]} for each in QUESTIONS]  # without the images


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MTRL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def encoder():
    return build_encoder(load_config(CONFIG_FILE))


def with_images(values):
    return [{**row, "images": value} for row, value in zip(OWN, values, strict=True)]


def image_files(folder):
    """The names of image files in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, each in enumerate(QUESTIONS):
        (folder / f"{number}.png").write_bytes(png(each))
    return [f"{number}.png" for number in range(len(QUESTIONS))]


def text_images():
    return [base64.b64encode(png(each)).decode() for each in QUESTIONS]


# ------------------------------------------------------------------------------------------------------ what is read
def paths(folder):
    values = [image_files(folder)[0], [str(folder / "1.png")], {"path": "2.png"}, [{"image": f"file://{folder}/3.png"}]]
    return write_jsonl(folder / "train.jsonl", with_images(values))


def texts(folder):
    one, two, three, four = text_images()
    return write_jsonl(folder / "a.jsonl", with_images([one, [two], f"data:image/png;base64,{three}", [four]]))


def lines_in_json(folder):
    return write_jsonl(folder / "rows.json", with_images([[each] for each in text_images()]))


def parquet(folder):
    pq.write_table(pa.Table.from_pylist(with_images([[png(each)] for each in QUESTIONS])), folder / "train.parquet")
    return folder / "train.parquet"


def arrow(folder):
    table = pa.Table.from_pylist(with_images([{"bytes": png(each), "path": None} for each in QUESTIONS]))
    with pa.ipc.new_stream(str(folder / "rows.arrow"), table.schema) as out:
        out.write_table(table)
    return folder / "rows.arrow"


def splits(folder):
    import datasets

    (saved_to_disk(folder)).rename(folder / "one")
    one = datasets.load_from_disk(folder / "one")
    datasets.DatasetDict({"train": one, "test": one.select([0])}).save_to_disk(folder / "saved")
    return f"{folder / 'saved'}@train"


def a_folder(folder):
    rows = with_images(image_files(folder / "data"))
    for number, part in enumerate((rows[:3], rows[3:])):
        write_jsonl(folder / "data" / f"train-{number}.jsonl", part)
    write_jsonl(folder / "data" / "test-0.jsonl", rows[:1])
    return f"{folder / 'data'}@train"


def several(folder):
    rows = with_images([[each] for each in text_images()])
    pq.write_table(pa.Table.from_pylist(rows[2:]), folder / "c.parquet")
    write_jsonl(folder / "a.jsonl", rows[:1])
    (folder / "b").mkdir()
    write_jsonl(folder / "b" / "1.jsonl", rows[1:2])
    return f"{folder}/a.jsonl, {folder}/b/, {folder}/c.parquet"


def messages(folder):
    chats = [
        [{"role": "user", "content": each["prompt"]}, {"role": "assistant", "content": each["answer"]}]
        for each in QUESTIONS
    ]
    rows = [{"messages": chat, "image": name} for chat, name in zip(chats, image_files(folder), strict=True)]
    return write_jsonl(folder / "a.jsonl", rows)


def texts_in_a_tar(folder):
    with tarfile.open(folder / "a.tar", "w") as tar:
        for number, each in enumerate(QUESTIONS):
            for ending, data in (("txt", asked(each).encode()), ("cls", b"%d" % number), ("png", png(each))):
                add(tar, f"{number}.{ending}", data)
    return folder / "a.tar"


def python_rows(folder):
    (name,) = image_files(folder)[3:]
    first, second, third, _ = (each["images"][0] for each in QUESTIONS)
    return with_images([first, [second], png({"images": [third]}), folder / name])


READ = {  # by the first cell of the tables in docs/data.md
    "`train.jsonl`": [paths, texts],
    "`.json`": [sharegpt, lines_in_json],
    "`train.parquet`": [parquet],
    "`rows.arrow`": [arrow],
    "a folder from `save_to_disk`": [saved_to_disk, splits],
    "`shard-{000..127}.tar`": [webdataset, texts_in_a_tar],
    "a folder": [a_folder],
    "`org/name@split`": [],  # tests/unit/test_hub.py
    "`a.jsonl, b/, c.parquet`": [several],
    "EasyR1": [easyr1],
    "TRL": [trl],
    "verl": [verl],
    "ShareGPT, LLaVA": [sharegpt],
    "chat messages": [messages],
    "WebDataset": [webdataset],
    "Python": [python_rows],
}
FORMS = list(dict.fromkeys(form for forms in READ.values() for form in forms))


def test_every_format_of_the_page_is_here():
    page = DOCS.read_text(encoding="utf-8")
    files, columns = page.partition("## Files")[2], page.partition("| format |")[2]
    tables = [text.partition("\n\n|---")[0].strip().partition("\n\n")[0] for text in (files, columns)]
    cells = [line.split(" | ")[0].strip("| ") for table in tables for line in table.splitlines() if " | " in line]
    named = {cell for cell in cells if cell and not cell.startswith(("-", "prompt"))}
    assert named == READ.keys() - {"`.json`", "Python"} and set(FORMATS) <= set(FORMS)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_the_pixels_arrive(form, tmp_path, encoder):
    data = form(tmp_path)
    sources = open_data_sources(data if isinstance(data, list) else str(data), "train")
    with Sampler(open_dataset(sources, DataSettings(), encoder), encoder, shuffle=False) as sampler:
        prompts = sampler.take(len(QUESTIONS))
    for number, (prompt, question) in enumerate(zip(prompts, QUESTIONS, strict=True)):
        (seen,) = prompt.media
        assert np.array_equal(seen, np.asarray(question["images"][0].convert("RGB"))), "the picture of this very row"
        tokens = seen.shape[0] * seen.shape[1] // encoder.image_settings.factor**2
        assert int((prompt.token_pool == VISION_POOL).sum()) == tokens > 0
        assert encoder.inputs(prompt)["pixel_values"].std() > 0.1, "and not an empty one"
        assert prompt.task.text == question["prompt"]
        assert prompt.task.answer == (number if form is texts_in_a_tar else question["answer"]), "a .cls is a number"


# --------------------------------------------------------------------------------------------------- what is refused
def rows(*values, name="a.jsonl", **more):
    return lambda folder: write_jsonl(folder / name, [{"prompt": "Which?", "images": each, **more} for each in values])


def chat(*parts):
    return lambda folder: write_jsonl(folder / "a.jsonl", [{"prompt": [{"role": "user", "content": list(parts)}]}])


def written(name, content=b""):
    def make(folder):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        return folder / name

    return make


def refers_to(kind):
    return rf"the prompt contains an? {kind} itself; put it in the column of {kind}s \(dataset\.{kind}_key\)"


def only_images(folder):
    image_files(folder / "photos")
    return folder / "photos"


def tar_without_text(folder):
    with tarfile.open(folder / "a.tar", "w") as tar:
        add(tar, "0.png", png(QUESTIONS[0]))
    return folder / "a.tar"


def table(**columns):
    def make(folder):
        pq.write_table(pa.table(columns), folder / "a.parquet")
        return folder / "a.parquet"

    return make


GOOD, PNG, ROW = [text_images()[0]], png(QUESTIONS[0]), "row 1: "
REFUSED = {  # the file, and what the message says beside its name
    "a spreadsheet": (written("a.csv", b"prompt,image\nWhich?,1.png\n"), "jsonl"),
    "compressed lines": (written("a.jsonl.gz", b"\x1f\x8b\x08"), "jsonl"),
    "an empty file": (written("a.jsonl"), "holds no row; a row is an object"),
    "an empty folder": (lambda folder: (folder / "data").mkdir() or folder / "data", "jsonl"),
    "a folder of images": (only_images, "jsonl"),
    "a file that is not there": (lambda folder: folder / "train.jsonl", "does not exist"),
    "a split that is not there": (lambda folder: f"{rows(GOOD)(folder)}@test", "has no split 'test'"),
    "a web address": (rows("https://example.org/1.jpg"), ROW + ".*download it and give its path"),
    "a number": (rows(7), ROW + "an image is a int; expected a path, bytes"),
    "an empty text in a list": (rows([""]), ROW + "an image is an empty text; expected a path"),
    "a list as text": (rows('["1.png", "2.png"]'), ROW + ".*does not exist"),
    "a list of lists": (rows([[GOOD[0]]]), ROW),
    "base64 of text": (rows("data:image/png;base64,aGVsbG8="), ROW + ".*not an image"),
    "base64 cut off": (rows(GOOD[0][:-7]), ROW + ".*base64|truncated"),
    "a data address without base64": (rows("data:image/svg+xml,<svg/>"), ROW + ".*without base64"),
    "a video as an image": (rows("1.mp4"), ROW + ".*1.mp4 does not exist"),
    "half of the rows": (rows(GOOD, "gone.png"), "1 of 2 rows.*row 2: .*does not exist; set dataset.image_dir"),
    "OpenAI's chat": (chat({"type": "image_url", "image_url": {"url": GOOD[0]}}), ROW + refers_to("image")),
    "Qwen's chat": (chat({"type": "image", "image": "1.png"}, {"type": "text", "text": "?"}), ROW + refers_to("image")),
    "a film in a chat": (chat({"type": "video_url", "video_url": {"url": "a.mp4"}}), ROW + refers_to("video")),
    "a tar without texts": (tar_without_text, ROW + ".*dataset.prompt_key"),
    "no prompt": (
        table(text=["Which?"], image=[png(QUESTIONS[0])]),
        ROW + ".*'prompt' .dataset.prompt_key.; it has text",
    ),
    "a column of bytes": (
        table(prompt=["a"], photo=[PNG]),
        "'photo' of .*row 1 .*dataset.image_key=photo",
    ),
    "an empty image": (table(prompt=["<image>a"], images=[b""]), ROW + ".*empty"),
    "a null image": (
        table(prompt=["<image>a", "b"], images=[None, PNG]),
        ROW + ".*1 image mark for 0 images",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_file_row_and_what_to_do(name, tmp_path):
    make, says = REFUSED[name]
    file = str(make(tmp_path))
    with pytest.raises(DataError) as caught:
        open_dataset(file, DataSettings(), FakeEncoder())
    message = str(caught.value)
    assert file.removesuffix("@test") in message
    assert re.search(says, message, re.DOTALL), message
    assert len(message.splitlines()) <= 3
