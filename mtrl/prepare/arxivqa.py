"""VisRAG's ArxivQA: questions, figures and which figure belongs to which question are three tables, joined here.

Questions come in the order of their figures, so that the figures, which are large, are read once from first to last;
questions and relations, which are small, are held.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mtrl.data.row_settings import DataError
from mtrl.prepare.questions import Head, RowFault, SourceQuestion
from mtrl.prepare.tables import open_table, want_columns
from mtrl.prepare.texts import LeftOut, checked_options, option_letter, option_list, without_labels

NAME, HUB, SPLIT = "arxivqa", "openbmb/VisRAG-Ret-Test-ArxivQA", "train"
TITLE = "VisRAG-ArxivQA"


class ArxivReader:
    name = NAME

    def __init__(self, where: str, split: str) -> None:
        queries, self.corpus, qrels = (open_table(where, split, config) for config in ("queries", "corpus", "qrels"))
        want_columns(queries, ("query-id", "query", "options", "answer"), TITLE)
        want_columns(self.corpus, ("corpus-id", "image"), TITLE)
        want_columns(qrels, ("query-id", "corpus-id"), TITLE)
        self.stamp = [queries.stamp, self.corpus.stamp, qrels.stamp]
        place = {str(row["corpus-id"]): at for at, row in enumerate(self.corpus.scan(["corpus-id"]))}
        figures: dict[str, list[int]] = {}  # of a question: the figures that are relevant for it
        scored = ["score"] if "score" in qrels.columns else []
        for row in qrels.scan(["query-id", "corpus-id", *scored]):
            if row.get("score") is None or row["score"] > 0:
                at = place.get(str(row["corpus-id"]), -1)
                figures.setdefault(str(row["query-id"]), []).append(at)
        rows = [dict(row) for row in queries.scan(["query-id", "query", "options", "answer"])]
        shown = [(figures.get(str(row["query-id"]), []), row) for row in rows]
        self.rows = sorted(shown, key=lambda each: max(each[0], default=-1))
        if rows and not any(places for places, _ in shown):
            raise DataError(f"{qrels.name} relates no question of {queries.name} to a figure; are they of one dataset?")

    def __len__(self) -> int:
        return len(self.rows)

    def heads(self) -> Iterator[Head]:
        for places, row in self.rows:
            key = str(row["query-id"])
            id = f"{NAME}/{key}"
            try:
                if not places:
                    raise LeftOut("no figure is related to it")
                option_letter(row["answer"], _options(row))
                yield Head(key, id, id)
            except LeftOut as left_out:
                yield Head(key, id, id, str(left_out))

    def questions(self, start: int, wanted: np.ndarray) -> Iterator[tuple[int, SourceQuestion | RowFault]]:
        """A figure is let go after the last question that shows it."""
        chosen = [index for index in range(start, len(self)) if wanted[index]]
        last = {at: index for index in chosen for at in self.rows[index][0]}
        seen = min((at for at in last if at >= 0), default=0)
        scanned = self.corpus.scan(["image"], seen)
        held: dict[int, Any] = {-1: None}
        for index in chosen:
            places, row = self.rows[index]
            while seen <= max(places):
                image = next(scanned)["image"]
                if seen in last:
                    held[seen] = image
                seen += 1
            yield index, _question(row, [held[at] for at in places], self)
            for at in places:
                if at >= 0 and last[at] == index:
                    held.pop(at, None)


def _options(row: dict[str, Any]) -> list[str]:
    return checked_options(without_labels(option_list(row["options"])))


def _question(row: dict[str, Any], images: list[Any], reader: ArxivReader) -> SourceQuestion | RowFault:
    id, options = f"{NAME}/{row['query-id']}", _options(row)
    if any(image is None for image in images):
        return RowFault(id, "the figure that is related to it is not in the corpus")
    answer, prompt = option_letter(row["answer"], options), "<image>" * len(images) + str(row["query"]).strip()
    return SourceQuestion(id, id, prompt, answer, options, images, NAME, reader.corpus.directory)


def reader(where: str, split: str) -> ArxivReader:
    return ArxivReader(where, split)
