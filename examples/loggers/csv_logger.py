"""Your own logger: one line of CSV per step, with the best response and its mean visual dependency. In a YAML:

training:
  logger: [console, {name: examples/loggers/csv_logger.py:CsvLogger, path: best.csv}]
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import mtrl

METRICS = ("reward/overall", "actor/grad_norm")  # any names of metrics.jsonl
COLUMNS = ("step", *METRICS, "best_reward", "best_dependency", "best_response")


@dataclass
class CsvLogger(mtrl.Callback):
    path: str = "best.csv"
    needs = mtrl.Needs("dependency")  # measured for this logger even if no rule reads it

    def __post_init__(self):
        self.best = ()
        if not Path(self.path).exists():
            self.write(COLUMNS)

    def rollouts(self, step, experience):
        """Called first in a step. Tensors are on the CPU; row i of each belongs to response i."""
        row = int(experience.rewards.total.argmax())
        dependency = experience.signals.dependency[row, experience.rollouts.mask[row]].mean()
        self.best = (float(experience.rewards.total[row]), float(dependency), experience.rollouts.text[row])

    def metrics(self, step, values):
        """Called second. The available metrics depend on the configuration and on the step."""
        self.write((step, *(values.get(name) for name in METRICS), *self.best))

    def write(self, row):
        with Path(self.path).open("a", newline="", encoding="utf-8") as file:  # closed: a run may be killed
            csv.writer(file).writerow(row)
