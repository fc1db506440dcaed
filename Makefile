# `make` or `make help` lists what there is. Every target sets up what it needs; a second run does not.
VENV ?= .venv
PYTHON ?= python3
SETUP ?= 1
export VENV PYTHON GPU SYSTEM_MPI HOROVOD
.DEFAULT_GOAL := help
.PHONY: help setup demo test tests lint types unit parallel proof mutants docs gpu doctor clean

# processes that share the tests, one per core (nproc prints OMP_NUM_THREADS if that is set)
WORKERS ?= $(shell env -u OMP_NUM_THREADS nproc)
# another one draws other faults
SEED ?= 1
BIN := $(abspath $(VENV))/bin
# where the documentation is built
DOCS_VENV ?= .venv-docs

help:
	@echo 'make demo     train on digits with 4 ranks: dense, then DGC at 0.1 % of the gradient'
	@echo 'make test     lint, types, unit tests, laws, parallel tests under mpirun, horovodrun and torchrun'
	@echo 'make proof    the long proofs, and types and shapes of all arguments in tests of one process (many minutes)'
	@echo 'make mutants  put 200 faults into a copy of the source, one at a time: the tests must detect most (an hour)'
	@echo 'make docs     the documentation as a site of its own: site/index.html (needs no set-up)'
	@echo 'make gpu      on a GPU: the laws of its kernels, times, waits for the device (needs no set-up)'
	@echo 'make doctor   versions, Horovod, MPI, torch.distributed, GPU; what is wrong, and its cure'
	@echo 'make setup    only the environment; make lint, types, unit, parallel: one part of make test'
	@echo 'make clean    remove the environment and the caches (runs/ and data/ stay)'
	@echo
	@echo 'PYTHON=python3.12   the interpreter to start from'
	@echo 'VENV=PATH           where the environment lives, or an existing one to install into'
	@echo 'SETUP=0             use the environment VENV as it is; install nothing'
	@echo 'HOROVOD=0           without Horovod and MPI: torch.distributed connects the ranks'
	@echo 'SYSTEM_MPI=1        use the Open MPI whose mpicc is on PATH, not the one from PyPI'
	@echo 'GPU=1               build Horovod with NCCL operations (needs CUDA and NCCL)'
	@echo 'HOROVOD, GPU and SYSTEM_MPI are remembered; docs/install.md says more'

setup:
ifneq ($(SETUP),0)
	@bash scripts/setup.sh
endif
	@$(BIN)/python dgc/kernels/build.py

demo: setup
	@$(BIN)/python -m scripts.demo

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports --no-cache --no-logo

types: setup
	@$(BIN)/mypy

# types need one core for a minute; their errors are printed again in the end, where they are seen
test: lint
	@$(MAKE) --no-print-directory -j 2 types tests || { $(MAKE) --no-print-directory types; exit 1; }

tests: setup
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

unit: setup
	@$(BIN)/python -m pytest --ignore tests/parallel

parallel: setup
	@$(BIN)/python -m pytest tests/parallel

# Types and shapes of arguments are checked in every call, which doubles the time of tests of one process.
# pytest ends with 5 where no test is marked as a proof
CHECKED := --jaxtyping-packages=dgc,typecheck.checked
# the oldest and the newest torch on which the adapters' tests are run
TORCHES ?= 2.4.1 2.15.0
proof: setup
	@$(BIN)/python -m pytest $(CHECKED) --ignore tests/parallel
	@$(BIN)/python -m pytest $(CHECKED) -m proof || test $$? -eq 5
	@PYTHON=$(BIN)/python bash tools/torch_versions.sh $(TORCHES)

mutants: setup
	@$(BIN)/python -m tools.mutants --workers $(WORKERS) --seed $(SEED)

# needs no set-up, and reads the source without running it: its environment has MkDocs alone. Without INFO lines
# (--quiet) MkDocs would not count warnings either
docs: $(DOCS_VENV)/.ready
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict
	@echo 'documentation: site/index.html'

$(DOCS_VENV)/.ready: requirements-docs.txt
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	@touch $@

# needs no set-up: PyTorch for CUDA and Triton are enough. PYTHON, where it is given, goes before the environment
gpu:
	@$(if $(filter file,$(origin PYTHON)),$(firstword $(wildcard $(BIN)/python) $(PYTHON)),$(PYTHON)) -m benchmarks.gpu

# needs no set-up, since it may be asked why set-up fails
doctor:
	@$(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m dgc.doctor

clean:
	rm -rf .venv .venv-docs site build dist *.egg-info .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
