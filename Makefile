# Everything a newcomer needs: `make train`, `make test`, `make check`. Each makes the environment when it is missing.

PYTHON ?= python3
VENV ?= .venv
# Flags for pip, such as --extra-index-url https://download.pytorch.org/whl/cpu for a small torch without CUDA.
PIP_FLAGS ?=

# make train CONFIG=configs/eurosat.yaml PROCS=1 ARGS='train.steps=200 run.seed=1'
CONFIG ?= configs/base.yaml
PROCS ?= 2
ARGS ?=
# make test TESTS='tests/quantizers -k fsq' JOBS=4
TESTS ?=
JOBS ?= 2

BIN := $(VENV)/bin
# What is installed: the package alone; what tests need; what checks and the documentation need; an object store's server.
STAMP := $(VENV)/.installed
TEST_STAMP := $(VENV)/.installed-test
DEV_STAMP := $(VENV)/.installed-dev
FAULTS_STAMP := $(VENV)/.installed-test-s3
# make test-gpu SYSTEM=1: the environment of $(PYTHON) as it is, for machines without a network (docs/gpu.md).
PY := $(BIN)/python
ifdef SYSTEM
PY := $(PYTHON)
BIN := $(patsubst %/,%,$(dir $(shell command -v $(PYTHON))))
STAMP :=
TEST_STAMP :=
DEV_STAMP :=
FAULTS_STAMP :=
endif
SOURCES := src tests $(wildcard scripts benchmarks examples)

# Processes share the cores; without this each would start a thread on every one of them.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help bundle train test test-slow test-gpu faults check format docs readme-images clean

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1|/' | column -t -s '|'
	@echo '  variables: PYTHON=$(PYTHON) CONFIG=$(CONFIG) PROCS=$(PROCS) ARGS=$(ARGS) TESTS=$(TESTS) JOBS=$(JOBS) VENV=$(VENV) SYSTEM=1 (the environment of PYTHON as it is)'

train: $(STAMP) ## train, evaluate and export: CONFIG=file PROCS=processes ARGS='section.key=value ...'
	@sed -n '/^#/!q; s/^# \([^ ]\)/\1/p' $(CONFIG) | fold -s -w 100    # what it trains, in which stages, and how long that takes
	$(BIN)/torchrun --standalone --nproc-per-node $(PROCS) -m vqclip train $(CONFIG) $(ARGS)

test: $(TEST_STAMP) ## run the tests: TESTS='paths and flags of pytest' JOBS=processes
	$(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(TESTS)

test-slow: $(TEST_STAMP) ## run the tests that take minutes
	$(PY) -m pytest -m slow $(TESTS)

test-gpu: $(TEST_STAMP) ## run the tests that need a GPU, or several
	$(PY) -m pytest -m gpu $(TESTS)

bundle: $(TEST_STAMP) ## pack the project and wheels for a machine with a GPU but without a network: docs/gpu.md
	$(PY) scripts/offline_bundle.py

faults: $(TEST_STAMP) $(FAULTS_STAMP) ## run the tests that kill, corrupt and fuzz, for half an hour
	$(PY) -m pytest -m faults $(TESTS)

check: $(DEV_STAMP) ## check format, style and types
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy

format: $(DEV_STAMP) ## format the code, and fix what ruff can fix
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

docs: $(DEV_STAMP) ## build the documentation: site/index.html
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

readme-images: $(TEST_STAMP) ## draw the images of the README from runs/base, which `make train` makes: 15 seconds
	$(PY) scripts/readme_images.py runs/base --out docs/images

clean: ## remove the environment and all caches; runs are kept
	rm -rf $(VENV) site .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "vqclip needs Python 3.10 or later, got $$($(PYTHON) --version 2>&1); set PYTHON=..."; exit 1; }
	@echo 'making the environment $(VENV), once: some minutes, most of them for PyTorch'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_FLAGS) -e .
	@touch $@

$(TEST_STAMP): pyproject.toml | $(STAMP)
	$(BIN)/python -m pip install $(PIP_FLAGS) -e '.[test]'
	@touch $@

$(DEV_STAMP): pyproject.toml | $(STAMP)
	$(BIN)/python -m pip install $(PIP_FLAGS) -e '.[dev]'
	@touch $@ $(TEST_STAMP)

$(FAULTS_STAMP): pyproject.toml | $(TEST_STAMP)
	$(BIN)/python -m pip install $(PIP_FLAGS) -e '.[test-s3]'
	@touch $@
