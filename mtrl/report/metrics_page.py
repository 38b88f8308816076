"""Every metric in a table per group. `docs/metrics.md` is written by

python -m mtrl.report.metrics_page > docs/metrics.md
"""

from __future__ import annotations

import re

from mtrl.report.markdown_text import table
from mtrl.utils.metric_glossary import metric_groups

HEAD = """\
# Metrics

<!-- `make reference` writes this page from mtrl/utils/metrics.yaml. -->

Every metric of `metrics.jsonl` and of the loggers, with its unit, what it measures and how to read it.
`mtrl config explain actor/entropy` prints one entry, and [mtrl view](viewer.md) shows it when the pointer rests on the
name. A name with `{..}` stands for a family: `reward/{function}` is `reward/brief` for a function `brief`. A share is
from 0 to 1. A metric that does not apply to a step is left out of its row. Metrics that your own credit rules return
([extending.md](extending.md)) are not listed.
"""
NAME = re.compile(r"(?<![`\w./])[a-z][\w@]*(?:[./][\w@{}*]+)+")  # a metric or a key, not in backticks yet


def make_page() -> str:
    heads = ["metric", "unit", "meaning", "how to read it"]
    parts = [HEAD]
    for title, metrics in metric_groups().items():
        rows = [[each.name, each.unit, each.meaning, each.reading] for each in metrics]
        rows = [[NAME.sub(r"`\g<0>`", cell) for cell in row] for row in rows]
        parts.append(f"## {title}\n\n{table(heads, rows)}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(make_page(), end="")
