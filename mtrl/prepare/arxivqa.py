"""VisRAG's ArxivQA: joins its three tables of questions, figures and the relations between them.

Questions come in the order of their figures, so that the figures, which are large, are read once from first to last;
questions and relations are small and stay in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mtrl.data.row_settings import DataError
from mtrl.prepare.questions import RowFault, RowHeader, SourceQuestion
from mtrl.prepare.tables import check_columns, open_table
from mtrl.prepare.texts import SkipRow, check_options, option_letter, parse_options, strip_labels

NAME, HUB, SPLIT = "arxivqa", "openbmb/VisRAG-Ret-Test-ArxivQA", "train"
TITLE = "VisRAG-ArxivQA"
QUESTION = ("query-id", "query", "options", "answer")
NO_FIGURE = -1  # index of a figure that is not in the corpus


class ArxivReader:
    name = NAME

    def __init__(self, source: str, split: str) -> None:
        queries, self.corpus, qrels = (open_table(source, split, config) for config in ("queries", "corpus", "qrels"))
        check_columns(queries, QUESTION, TITLE)
        check_columns(self.corpus, ("corpus-id", "image"), TITLE)
        check_columns(qrels, ("query-id", "corpus-id"), TITLE)
        self.stamp = [queries.stamp, self.corpus.stamp, qrels.stamp]
        index = {str(row["corpus-id"]): i for i, row in enumerate(self.corpus.scan(["corpus-id"]))}
        figures: dict[str, list[int]] = {}  # indices of the relevant figures, by question
        score = ["score"] if "score" in qrels.columns else []
        for row in qrels.scan(["query-id", "corpus-id", *score]):
            if row.get("score") is None or row["score"] > 0:
                figure = index.get(str(row["corpus-id"]), NO_FIGURE)
                figures.setdefault(str(row["query-id"]), []).append(figure)
        rows = [(figures.get(str(row["query-id"]), []), dict(row)) for row in queries.scan(QUESTION)]
        self.rows = sorted(rows, key=lambda each: max(each[0], default=NO_FIGURE))
        if rows and not any(related for related, _ in rows):
            raise DataError(f"{qrels.name} relates no question of {queries.name} to a figure; are they of one dataset?")

    def __len__(self) -> int:
        return len(self.rows)

    def headers(self) -> Iterator[RowHeader]:
        for figures, row in self.rows:
            key = str(row["query-id"])
            id = f"{NAME}/{key}"
            try:
                if not figures:
                    raise SkipRow("no figure is related to it")
                option_letter(row["answer"], _read_options(row))
                yield RowHeader(key, id, id)
            except SkipRow as reason:
                yield RowHeader(key, id, id, str(reason))

    def questions(self, start: int, wanted: np.ndarray) -> Iterator[tuple[int, SourceQuestion | RowFault]]:
        """A figure is released after the last question that shows it."""
        chosen = [index for index in range(start, len(self)) if wanted[index]]
        last_use = {figure: index for index in chosen for figure in self.rows[index][0]}
        next_figure = min((figure for figure in last_use if figure != NO_FIGURE), default=0)
        scan = self.corpus.scan(["image"], next_figure)
        images: dict[int, Any] = {NO_FIGURE: None}
        for index in chosen:
            figures, row = self.rows[index]
            while next_figure <= max(figures):
                image = next(scan)["image"]
                if next_figure in last_use:
                    images[next_figure] = image
                next_figure += 1
            yield index, self._make_question(row, [images[figure] for figure in figures])
            for figure in figures:
                if figure != NO_FIGURE and last_use[figure] == index:
                    images.pop(figure, None)

    def _make_question(self, row: dict[str, Any], images: list[Any]) -> SourceQuestion | RowFault:
        id, options = f"{NAME}/{row['query-id']}", _read_options(row)
        if any(image is None for image in images):
            return RowFault(id, "the figure that is related to it is not in the corpus")
        answer, prompt = option_letter(row["answer"], options), "<image>" * len(images) + str(row["query"]).strip()
        return SourceQuestion(id, id, prompt, answer, options, images, NAME, self.corpus.directory)


def _read_options(row: dict[str, Any]) -> list[str]:
    return check_options(strip_labels(parse_options(row["options"])))
