"""A comparison of runs for a notebook: their curves and the table of `mtrl compare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from mtrl.compare.arms import Arm, choose_endpoint
from mtrl.report.arm_differences import make_differences_page
from mtrl.report.chart import Panel, make_chart
from mtrl.report.compare_page import compare, make_page, table_heads, table_row
from mtrl.report.run_curves import REWARD, metric_panels
from mtrl.report.style import to_html


class Comparison:
    """Runs compared with the first of them. A notebook shows it as HTML; as text it is the page of `mtrl compare`."""

    def __init__(self, arms: Sequence[Arm]) -> None:
        self.arms, self.metric = arms, choose_endpoint(arms)
        self.verdicts = compare(arms, self.metric)

    def __repr__(self) -> str:
        return make_page(self.verdicts, self.metric) + make_differences_page(self.arms)

    def _repr_html_(self) -> str:
        runs = {arm.name: run.curves for arm in self.arms for run in arm.runs.values()}
        panels = [show_baseline(panel, self.arms[0].name) for panel in metric_panels(runs, [REWARD[0], self.metric])]
        rows = without_empty([table_heads(self.arms[0].name), *map(table_row, self.verdicts)])
        cells = "".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in without_empty(rows)
        )
        chart = to_html(make_chart(f"{len(runs)} runs compared", panels), "curves of the runs")
        return f"{chart}<table>{cells}</table>"


def show_baseline(panel: Panel, name: str) -> Panel:
    """The panel with the baseline as a wide line behind the others: it is seen even if they are the same."""
    return replace(panel, lines=[replace(line, reference=line.name == name) for line in panel.lines])


def without_empty(rows: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """The table without the columns that no row has a value in, such as tests over seeds if there is one seed."""
    columns = [column for column in zip(*rows, strict=True) if set(column[1:]) - {"", "-"}]
    return list(zip(*columns, strict=True))
