# make setup      a virtual environment in .venv with everything the tests need
# make demo       a vision-language model learns by reinforcement, on this machine, in minutes
# make test       the suite, minutes on two cores
# make test-all   also what is slow: mutation runs, long learning runs
# make soak       hours: kills, mutated input, a thousand steps; goes on where it was stopped
# make lint       ruff and mypy
# make reference  docs/config-reference.yaml, from the tree of keys

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: setup demo test test-all soak lint format reference

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/mtrl demo

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-all: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "slow or not slow"
	$(BIN)/python tests/mutation.py

soak: setup
	$(BIN)/python tests/soak

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

reference: setup
	$(BIN)/python -m mtrl.config.reference > docs/config-reference.yaml

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
