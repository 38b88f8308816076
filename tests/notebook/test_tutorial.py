"""examples/tutorial.ipynb runs, learns and shows what it says; a run in a cell can be interrupted and continued."""

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from run_notebook import printed, run, shown

TUTORIAL = Path(__file__).parents[2] / "examples" / "tutorial.ipynb"
HTML = "text/html"


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """The code cells after a run, by the first word that identifies them."""
    executed = run(nbformat.read(TUTORIAL, as_version=4), tmp_path_factory.mktemp("tutorial"))
    return {cell.source.split(None, 1)[0]: cell for cell in executed.cells if cell.cell_type == "code"}


def last_accuracy(html):
    first, last = re.search(r"val/avg@1: ([\d.]+) at step 0, ([\d.]+) at step 6", html).groups()
    return float(first), float(last)


@pytest.mark.parametrize("name", ["settings", "filtered"])
def test_the_run_is_shown_in_its_cell_and_learns(cells, name):
    cell = cells[name]
    (html,) = shown(cell, HTML)
    assert "finished at step 6/6" in html and html.count("<img") == 1, "one output, updated in place"
    first, last = last_accuracy(html)
    assert last > first + 0.1
    assert "step 6/6" not in printed(cell), "the console's lines are not printed as well"


def test_the_tokens_of_responses_are_shown(cells):
    (html,) = shown(cells["filtered.view(step=1)"], HTML)
    assert html.count("<img") == 2 and "visual dependency S" in html
    tokens = re.findall(r'border-bottom: 2px solid( transparent)?;[^>]*title="([^"]*)"', html)
    trained = sum(not transparent for transparent, _ in tokens)
    assert 0 < trained < len(tokens) / 2 and all("dependency" in tip for _, tip in tokens)


def test_two_runs_are_compared_by_question(cells):
    (html,) = shown(cells["plain.compare(filtered)"], HTML)
    head, plain, filtered = (re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", html))
    row = dict(zip(head, filtered, strict=True))
    assert plain[0] == "plain" and row["arm"] == "filtered"
    assert re.fullmatch(r"\d+, \d+", row["questions won, lost"])


def test_the_stored_outputs_are_small_and_name_no_folder_of_a_machine():
    stored = TUTORIAL.read_text()
    assert len(stored) < 300_000
    assert not re.search(r"/(home|root|tmp|Users|work)/", stored)


INTERRUPTED = """
import os, signal, mtrl

class Interrupt(mtrl.Callback):
    def rollouts(self, step, experience):
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)  # as the button of a notebook

def brief(data):
    return 1 / (1 + len(data["response"]))

rows = [{"prompt": f"Say {word}.", "answer": word} for word in ("red", "blue", "green", "pink")]
sizes = {"max_steps": 2, "rollout_batch_size": 2, "global_batch_size": 2, "n": 2, "max_response_length": 8}
trainer = mtrl.Trainer(data=rows, val_data=rows, rewards=brief, callbacks=Interrupt(), val_freq=-1, **sizes)
trainer.train()
"""


def test_an_interrupted_cell_saves_and_train_continues(tmp_path):
    """The same numbers as without an interrupt: tests/runs/test_trainer_runs.py."""
    sources = [INTERRUPTED, "trainer.train()", "[row['step'] for row in trainer.history]"]
    notebook = new_notebook(cells=[new_code_cell(source) for source in sources])
    first, second, third = run(notebook, tmp_path, allow_errors=True).cells
    assert [each.ename for each in first.outputs if each.output_type == "error"] == ["KeyboardInterrupt"]
    assert "stopped at step 1/2" in shown(first, HTML)[0] and "saved after step 1" in printed(first)
    assert "finished at step 2/2" in shown(second, HTML)[0] and "resuming after step 1" in printed(second)
    assert shown(third, "text/plain") == ["[1, 2]"]
    assert os.listdir(tmp_path) == ["outputs"]
