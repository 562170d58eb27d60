PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# oneDNN's bf16 kernels for newer instruction sets stop with SIGILL on some CPUs.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench test-gpu clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## train a small model with and without slimgrad, write the results to out/
	$(BIN)/slimgrad demo --out out

test: $(READY) ## run the tests that need no GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

lint: $(READY) ## check style, types and import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: $(READY) ## measure what the gate costs per step
	$(BIN)/python benchmarks/gate_overhead.py

test-gpu: ## run the GPU tests with the python on PATH and its own torch
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu tests

clean: ## remove the virtual environment, caches and results
	rm -rf $(VENV) out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[test,demo,dev]'
	@touch $@
