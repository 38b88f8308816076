"""Runs a notebook in a kernel of its own, and reads its outputs.

python tests/notebook/run_notebook.py examples/tutorial.ipynb   # writes its outputs into it
"""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def run(notebook, directory, allow_errors=False):
    """The notebook with its outputs; an error in a cell raises."""
    options = {"timeout": None, "kernel_name": "python3", "allow_errors": allow_errors}
    client = NotebookClient(notebook, resources={"metadata": {"path": str(directory)}}, **options)
    # With this variable a kernel does not show what is written to stderr directly, as messages about signals are.
    return client.execute(env={name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"})


def shown(cell, kind):
    """The outputs of a cell of a MIME type."""
    return ["".join(output["data"][kind]) for output in cell.outputs if kind in output.get("data", {})]


def printed(cell):
    return "".join(output["text"] for output in cell.outputs if output["output_type"] == "stream")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as scratch:
        executed = run(nbformat.read(path, as_version=4), scratch)
    for each in executed.cells:
        each.metadata.pop("execution", None)  # times of day
        if each.cell_type == "code":  # messages, which depend on the machine
            each.outputs = [output for output in each.outputs if output.get("name") != "stderr"]
    nbformat.write(executed, path)
