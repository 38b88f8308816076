"""Files as EasyR1, TRL, verl, ShareGPT, `datasets` and WebDataset users have them: read as they are, and trained on."""

import io
import json
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_helpers import FakeEncoder, picture_bytes, write_jsonl

from mtrl.cli import main
from mtrl.compose.run import build
from mtrl.config import load_config
from mtrl.data import DataError, DataSettings, open_dataset
from mtrl.data.formats import detect_format, read_conversation
from mtrl.embedded.embedded_rows import CONFIG_FILE
from mtrl.embedded.task import make_question, row
from mtrl.tracking.jsonl import read_rows

ROWS = 4
QUESTIONS = [row(make_question("train", index)) for index in range(ROWS)]


def png(question):
    out = io.BytesIO()
    question["images"][0].save(out, "PNG")
    return out.getvalue()


def asked(question):
    return question["prompt"].removeprefix("<image>")


def easyr1(folder):
    """Like hiyouga/geometry3k: problem with marks, answer, images as structs."""
    rows = [
        {"problem": each["prompt"], "answer": each["answer"], "images": [{"bytes": png(each), "path": None}]}
        for each in QUESTIONS
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return folder / "train.parquet"


def trl(folder):
    """A chat whose parts mark the position of the image, with a column `image`; arrow fills absent keys with null."""
    parts = [[{"type": "image", "text": None}, {"type": "text", "text": asked(each)}] for each in QUESTIONS]
    rows = [
        {"prompt": [{"role": "user", "content": content}], "image": {"bytes": png(each), "path": None},
         "solution": each["answer"]}
        for content, each in zip(parts, QUESTIONS, strict=True)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return folder / "train.parquet"


def verl(folder):
    rows = [
        {
            "data_source": "zoo",
            "prompt": [{"role": "user", "content": each["prompt"]}],
            "images": [{"bytes": png(each), "path": None}],
            "ability": "vision",
            "reward_model": {"style": "rule", "ground_truth": each["answer"]},
            "extra_info": {"split": "train", "index": index, "question": asked(each)},
        }
        for index, each in enumerate(QUESTIONS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return folder / "train.parquet"


def sharegpt(folder):
    """Like LLaVA's instruction files: one .json array, with relative paths of images."""
    rows = []
    for index, each in enumerate(QUESTIONS):
        (folder / f"{index}.png").write_bytes(png(each))
        turns = [{"from": "human", "value": each["prompt"]}, {"from": "gpt", "value": each["answer"]}]
        rows.append({"id": str(index), "image": f"{index}.png", "conversations": turns})
    (folder / "llava.json").write_text(json.dumps(rows))
    return folder / "llava.json"


def saved_to_disk(folder):
    columns = {"problem": [each["prompt"] for each in QUESTIONS], "answer": [each["answer"] for each in QUESTIONS]}
    columns["images"] = [[each["images"][0]] for each in QUESTIONS]
    import datasets  # here, since it takes a second

    made = datasets.Dataset.from_dict(columns).cast_column("images", datasets.List(datasets.Image()))
    made.save_to_disk(folder / "saved")
    return folder / "saved"


def webdataset(folder):
    with tarfile.open(folder / "train-000.tar", "w") as tar:
        for index, each in enumerate(QUESTIONS):
            about = {"question": asked(each), "answer": each["answer"], "options": each["options"]}
            add(tar, f"{index:06d}.json", json.dumps(about).encode())
            add(tar, f"{index:06d}.png", png(each))
    return folder / "train-{000..000}.tar"


def add(tar, name, data):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


FORMATS = {  # file, and its description by `mtrl data`
    easyr1: "EasyR1 (problem, answer, images), in Parquet",
    trl: "TRL (prompt, image, solution), in Parquet",
    verl: "verl (prompt, data_source, reward_model, extra_info, images), in Parquet",
    sharegpt: "ShareGPT (conversations, image), in a list",
    saved_to_disk: "EasyR1 (problem, answer, images), in Arrow, as datasets saves it",
    webdataset: "questions (question, answer, options, images), in WebDataset (.json, .png)",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MTRL_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("written", FORMATS, ids=lambda each: each.__name__)
def test_rows_are_the_questions_and_the_format_is_reported(written, tmp_path, capsys):
    file = str(written(tmp_path))
    dataset = open_dataset(file, DataSettings(), FakeEncoder())
    assert len(dataset) == ROWS
    for index, each in enumerate(QUESTIONS):
        task = dataset.task(index)
        assert (task.text, task.answer, len(task.media)) == (each["prompt"], each["answer"], 1)
    assert main(["data", file]) == 0
    assert f"Format\n  {FORMATS[written]}\n" in capsys.readouterr().out


QUICK = (verl, sharegpt, webdataset)  # the others share their ways with these
TRAINED = [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in FORMATS]


@pytest.mark.parametrize("written", TRAINED, ids=lambda each: each.__name__)
def test_two_steps_of_training(written, tmp_path, monkeypatch):
    """Trains the embedded model on the file without keys for its columns."""
    monkeypatch.setattr("mtrl.tracking.curve.draw_runs", lambda *_, **__: None)  # saves half the time; not needed here
    sizes = {"dataset.rollout_batch_size": 2, "worker.actor.global_batch_size": 2, "worker.rollout.n": 2,
             "dataset.max_response_length": 6, "training.max_steps": 2, "training.save_freq": -1}  # fmt: skip
    places = {"dataset.train_files": str(written(tmp_path)), "training.output_dir": str(tmp_path / "runs")}
    run = build(load_config(CONFIG_FILE, sizes | places | {"training.logger": (), "worker.reward.num_cpus": 1}))
    before = {name: weight.clone() for name, weight in run.loaded.model.state_dict().items()}
    run.train()
    steps = [each for each in read_rows(run.directory / "metrics.jsonl") if "perf/seconds_step" in each]
    assert len(steps) == 2 and all("reward/accuracy" in each for each in steps)
    assert any(not weight.equal(before[name]) for name, weight in run.loaded.model.state_dict().items())


def test_a_conversation_is_cut_where_the_model_speaks_last():
    turns = [("system", "Be brief."), ("human", "<image>Hi"), ("gpt", "Hello"), ("human", "Which?"), ("gpt", "B")]
    found = read_conversation([{"from": who, "value": said} for who, said in turns])
    assert [each["role"] for each in found.prompt] == ["system", "user", "assistant", "user"] and found.truth == "B"
    openai = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": [{"type": "text", "text": "C"}]}]
    assert read_conversation(openai, "Be brief.").truth == "C"
    assert read_conversation(openai, "Be brief.").prompt[0] == {"role": "system", "content": "Be brief."}
    assert read_conversation(openai[:1]).truth is None
    for other in (None, [], "text", ["text"], [{"from": "human"}], [{"role": 3, "content": "x"}]):
        assert read_conversation(other) is None


def test_messages_without_an_answer_keep_the_column_that_has_it(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "2+2"}], "ground_truth": "4"}])
    task = open_dataset(str(file), DataSettings(), FakeEncoder()).task(0)
    assert (task.text, task.answer) == ("2+2", "4")
    assert detect_format({"messages": [{"role": "user", "content": "x"}]}) == "chat messages (messages)"


def test_verl_nests_images_twice(tmp_path):
    (tmp_path / "a.png").write_bytes(picture_bytes())
    shared = {"prompt": [{"role": "user", "content": "<image>which?"}], "reward_model": {"ground_truth": "B"}}
    file = write_jsonl(tmp_path / "a.jsonl", [{**shared, "images": [{"image": "a.png"}]}])
    assert len(open_dataset(str(file), DataSettings(), FakeEncoder()).task(0).media) == 1


def test_a_tar_of_several_images_texts_and_numbers(tmp_path):
    pictures = [picture_bytes(seed=seed) for seed in range(3)]
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, data in {"b.10.png": pictures[2], "b.2.png": pictures[1], "b.0.png": pictures[0]}.items():
            add(tar, f"x/{name}", data)
        add(tar, "x/b.txt", b"Which?\n")
        add(tar, "x/b.cls", b"3")
        add(tar, "x/c.txt", b"And this?")
        add(tar, "x/c.meta.json", b'{"level": 2}')
        add(tar, "README", b"no member of a row")
    for _ in range(2):  # the second time from the cache
        dataset = open_dataset(str(tmp_path / "a.tar"), DataSettings(), FakeEncoder())
        assert [medium.source for medium in dataset.task(0).media] == pictures and dataset.task(0).answer == 3
    again = open_dataset(str(tmp_path), DataSettings(), FakeEncoder())
    assert again.task(1).columns == {"__key__": "x/c", "txt": "And this?", "meta": {"level": 2}}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: data[: len(data) // 2], "cannot be read as a tar"),
        (lambda data: b"\x1f\x8b" + data, "is compressed"),
        (lambda data: data.replace(b'{"question"', b'{"question,'), r"member \.json cannot be read"),
    ],
)
def test_a_damaged_tar_is_one_clear_error(tmp_path, spoil, message):
    webdataset(tmp_path)
    file = tmp_path / "train-000.tar"
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(DataError, match=message):
        open_dataset(str(file), DataSettings(), FakeEncoder())


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_a_single_arrow_file(tmp_path, kind):
    table = pa.table({"prompt": ["a", "b"], "answer": ["x", "y"]})
    make = {"stream": pa.ipc.new_stream, "file": pa.ipc.new_file}[kind]
    with make(str(tmp_path / "a.arrow"), table.schema) as out:
        out.write_table(table)
    assert open_dataset(str(tmp_path / "a.arrow"), DataSettings(), FakeEncoder()).task(1).answer == "y"
