"""A logger of your own: one line of CSV a step, with the response that earned most and how much it hung on the image.

mtrl.Trainer(callbacks=[CsvLogger("best.csv")], ..).train()
"""

import csv
from pathlib import Path

import mtrl

NUMBERS = ("reward/overall", "actor/grad_norm")  # of those that metrics.jsonl has
COLUMNS = ("step", *NUMBERS, "best_reward", "best_dependency", "best_response")


class CsvLogger(mtrl.Callback):
    needs = mtrl.Needs("dependency")  # measured because it is asked for, even where no rule reads it

    def __init__(self, path):
        self.path, self.best = Path(path), ()
        if not self.path.exists():
            self.write(COLUMNS)

    def rollouts(self, step, experience):
        """Comes first in a step. Tensors are on the CPU; row i of each belongs to response i."""
        row = int(experience.rewards.total.argmax())
        dependency = experience.signals.dependency[row, experience.rollouts.mask[row]].mean()
        self.best = (float(experience.rewards.total[row]), float(dependency), experience.rollouts.text[row])

    def metrics(self, step, values):
        """Comes second. Which numbers there are depends on the configuration, and on the step."""
        self.write((step, *(values.get(name) for name in NUMBERS), *self.best))

    def write(self, row):
        with self.path.open("a", newline="", encoding="utf-8") as file:  # closed again: a run may be killed
            csv.writer(file).writerow(row)
