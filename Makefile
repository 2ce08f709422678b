# Everything works from a machine that has only python3, make and g++.
#   make demo       install, pretrain on handwritten digits, and compare (minutes)
#   make test       install, then the tests (minutes)
#   make test-runs  tests that start whole runs, on several ranks too (half an hour on two cores)
#   make test-all   all tests, the slow ones too (over an hour on two cores)
#   make test-wheel build the wheel, and try it in an environment and a folder without the checkout
#   make test-slurm start a small Slurm cluster on this machine and test jobs on it (Linux, root; installs Slurm by apt)
#   make docs       build the documentation as a site, and try its commands (long ones by --dry-run)
#   make lint       format, lint and type checks
#   make bench      the benchmarks that fit a laptop (PHOTOS=DIR: class folders of photographs for the loader;
#                   SMALL=DIR: small images in place of CIFAR-10, which is downloaded otherwise)
#   make bench-gpu  the benchmarks for a GPU, into docs/results/gpu (PARTS="rates" for some of them)

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUNS ?= runs
STAMP := $(VENV)/.installed
FAST := "not slow and not slurm and not docs"

export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test test-runs test-all test-wheel test-slurm docs lint bench bench-gpu clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

data/digits/dataset.json: | setup
	$(BIN)/mae-vit prepare digits data/digits

demo: setup data/digits/dataset.json
	PATH="$(CURDIR)/$(BIN):$$PATH" bash demo.sh $(RUNS)

# Of whole runs one: the losses of 20 steps are those recorded.
test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal -m $(FAST) tests/unit tests/repo tests/golden tests/slurm

test-runs: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m $(FAST) tests/runs tests/distributed

test-all: test-slurm
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slurm"
	$(BIN)/python -m pytest -m gpu  # skipped without a GPU, which all other tests do not see

test-wheel: setup
	$(BIN)/python -m pytest -m slow tests/repo/test_wheel.py tests/runs/api

test-slurm: setup
	$(BIN)/python -m pytest -m slurm tests/slurm

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest -n 2 -m docs tests/repo

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/shellcheck demo.sh slurm/*.sh slurm/containers/*.sh tests/slurm/cluster.sh .ci/run
	$(BIN)/hadolint slurm/containers/Dockerfile

bench: setup
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/scale.py --parts start compile saving
	$(BIN)/python benchmarks/objectives.py
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/profile_step.py
	$(BIN)/python benchmarks/loader.py $(if $(PHOTOS),--photos $(PHOTOS)) $(if $(SMALL),--small $(SMALL))

PARTS ?= rates feed views

bench-gpu: setup
	$(BIN)/python -m benchmarks.gpu $(PARTS) --out docs/results/gpu

clean:
	rm -rf $(VENV) build *.egg-info
