"""A comparison of runs for a notebook: their curves and the table of `mtrl compare`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from mtrl.compare.arms import Arm, choose_endpoint
from mtrl.report.chart import make_chart
from mtrl.report.compare_page import compare, make_page, table_heads, table_row
from mtrl.report.run_curves import metric_panels
from mtrl.report.style import to_html


class Comparison:
    """Runs compared with the first of them. A notebook shows it as HTML; as text it is the page of `mtrl compare`."""

    def __init__(self, arms: Sequence[Arm]) -> None:
        self.arms, self.metric = arms, choose_endpoint(arms)
        self.verdicts = compare(arms, self.metric)

    def __repr__(self) -> str:
        return make_page(self.verdicts, self.metric)

    def _repr_html_(self) -> str:
        runs = {arm.name: run.curves for arm in self.arms for run in arm.runs.values()}
        chart = make_chart(f"{len(runs)} runs compared", metric_panels(runs, ["reward/overall", self.metric]))
        heads = table_heads(self.arms[0].name)
        rows = [heads, *(table_row(verdict) for verdict in self.verdicts)]
        cells = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        return f"{to_html(chart, 'curves of the runs')}<table>{cells}</table>"
