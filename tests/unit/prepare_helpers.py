"""Small copies of public datasets in their published form: columns, nesting, folders, oddities."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from data_helpers import picture_bytes

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def image(seed: int, kind: str = "PNG") -> dict[str, Any]:
    return {"bytes": picture_bytes(24, 32, seed=seed, kind=kind), "path": f"{seed}.{kind.lower()}"}


def write(file: Path, rows: list[dict[str, Any]], schema: pa.Schema, group: int = 4) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), file, row_group_size=group)


AOKVQA = pa.schema(
    [
        ("image", IMAGE), ("question_id", pa.string()), ("question", pa.string()), ("choices", pa.list_(pa.string())),
        ("correct_choice_idx", pa.int8()), ("direct_answers", pa.string()), ("difficult_direct_answer", pa.bool_()),
        ("rationales", pa.list_(pa.string())),
    ]
)  # fmt: skip


def aokvqa_rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "image": image(i, "JPEG"), "question_id": f"22MexNkBPpdZGX6sxb{i:04d}", "question": f"What is number {i}?",
            "choices": ["skateboard", "train", f"bus {i}", "cab"], "correct_choice_idx": i % 4,
            "direct_answers": "['ride', 'bus']", "difficult_direct_answer": False, "rationales": ["a", "b", "c"],
        }
        for i in range(first, first + count)
    ]  # fmt: skip


def aokvqa(folder: Path, count: int = 30) -> Path:
    """Like HuggingFaceM4/A-OKVQA on the hub: shards of a split under data/; the test split has no answers."""
    half = count // 2
    write(folder / "data/train-00000-of-00002.parquet", aokvqa_rows(half), AOKVQA)
    write(folder / "data/train-00001-of-00002.parquet", aokvqa_rows(count - half, half), AOKVQA)
    unanswered = [{**row, "correct_choice_idx": None} for row in aokvqa_rows(3, 900)]
    write(folder / "data/test-00000-of-00001.parquet", unanswered, AOKVQA)
    return folder


def aokvqa_json(folder: Path, count: int = 6) -> Path:
    """The authors' own file, which refers to images of COCO 2017 by number."""
    rows = []
    for row in aokvqa_rows(count):
        number = 299207 + len(rows)
        file = folder / f"train2017/{number:012d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(row.pop("image")["bytes"])
        rows.append({"split": "train", "image_id": number, **row, "direct_answers": ["ride", "bus"]})
    (folder / "aokvqa_v1p0_train.json").write_text(json.dumps(rows))
    return folder


def arxivqa(folder: Path, count: int = 12) -> Path:
    """Like openbmb/VisRAG-Ret-Test-ArxivQA: three folders, more figures than questions, various or no labels."""
    corpus = [{"corpus-id": f"figures/{i:04d}.jpg", "image": image(100 + i, "JPEG")} for i in range(2 * count)]
    queries, qrels = [], []
    for i in range(count):
        texts = [f"a rise {i}", "a fall", "no trend", "a cycle"]
        labels = ["", "{}. ", "{}) ", "({}) "][i % 4]
        options = [labels.format(letter) + text for letter, text in zip("ABCD", texts, strict=True)]
        id = f"figures/{2 * i:04d}.jpg-{i}"
        answer = "ABCD"[i % 4] if i % 3 else options[i % 4]
        queries.append({"query-id": id, "query": f"What does panel {i} show?", "options": options, "answer": answer})
        qrels.append({"query-id": id, "corpus-id": f"figures/{2 * (count - 1 - i):04d}.jpg", "score": 1})
        qrels.append({"query-id": id, "corpus-id": f"figures/{2 * i + 1:04d}.jpg", "score": 0})
    queries[1]["answer"] = "it depends"
    queries[2]["options"] = [*queries[2]["options"][:3], "-"]
    text = pa.string()
    listed = pa.list_(text)
    write(folder / "corpus/train-00000-of-00001.parquet", corpus, pa.schema([("corpus-id", text), ("image", IMAGE)]))
    query_schema = pa.schema([("query-id", text), ("query", text), ("answer", text), ("options", listed)])
    write(folder / "queries/train-00000-of-00001.parquet", queries, query_schema)
    qrel_schema = pa.schema([("query-id", text), ("corpus-id", text), ("score", pa.int64())])
    write(folder / "qrels/train-00000-of-00001.parquet", qrels, qrel_schema)
    return folder


STANDARD = pa.schema(
    [("id", pa.string()), ("question", pa.string()), ("options", pa.string()), ("explanation", pa.string())]
    + [(f"image_{i}", IMAGE) for i in range(1, 8)]
    + [(name, pa.string()) for name in ("img_type", "answer", "topic_difficulty", "subject")]
)
VISION = pa.schema(
    [("id", pa.string()), ("image", IMAGE), *((n, pa.string()) for n in ("options", "answer", "subject"))]
)


def mmmu_pro(folder: Path, count: int = 10) -> Path:
    """Like MMMU/MMMU_Pro: the same questions three times, options as a list's repr, marks in both, 7 images."""
    for options in (4, 10):
        rows = [standard(i, options) for i in range(count)]
        write(folder / f"standard ({options} options)/test-00000-of-00001.parquet", rows, STANDARD)
    rows = [
        {"id": f"test_Art_{i}", "image": image(500 + i), "options": repr(["x", "y", "z"]), "answer": "B",
         "subject": "Art"}
        for i in range(count)
    ]  # fmt: skip
    write(folder / "vision/test-00000-of-00001.parquet", rows, VISION)
    return folder


def standard(i: int, count: int) -> dict[str, Any]:
    options, question = [f"choice {n} of Jane's" for n in range(count)], f"What is <image 1> in question {i}?"
    images = {1: image(300 + i)}
    if i == 1:  # images in the options, in another order, with the first one repeated
        options[0], options[1], options[2] = "<image 3>", "<image 2>", "as <image 1>"
        images |= {2: image(402), 3: image(403)}
    if i == 2:
        question = " ".join(f"<image {n}>" for n in range(1, 8))
        images = {n: image(410 + n) for n in range(1, 8)}
    row: dict[str, Any] = {"id": f"test_Art_{i}", "question": question, "options": repr(options)}
    row |= {f"image_{n}": images.get(n) for n in range(1, 8)}
    return row | {"explanation": "?", "img_type": "['Paintings']", "answer": "ABCDEFGHIJ"[i % count], "subject": "Art",
                  "topic_difficulty": "Medium"}  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file but the journal, which contains the time of the copy."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != ".prepared.json")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def read_rows(folder: Path) -> list[dict[str, Any]]:
    return [row for file in sorted(folder.glob("*/*.parquet")) for row in pq.read_table(file).to_pylist()]
