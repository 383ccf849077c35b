# Everything a person or CI does with this repository. `make` lists it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Long installs and engine starts are worth a line of progress even in a log file.
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTHON_FILES := src tests benchmarks run_vllm_gateway.py

.DEFAULT_GOAL := help
.PHONY: help setup demo test slow fuzz wheel check golden bench bench-gateway lock clean

help: ## List these targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## Install everything into .venv (about two minutes, once).

$(READY): requirements/cpu.lock requirements/cpu-nodeps.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
	  f"proofserve needs Python 3.11 or newer, this is {v.major}.{v.minor}; try make PYTHON=python3.11")'
	@echo "Installing the CPU build of vLLM and its requirements into $(VENV) (about two minutes) ..."
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --requirement requirements/cpu.lock
	$(PIP) install --no-deps --requirement requirements/cpu-nodeps.lock
	$(PIP) install --no-deps --editable .
	@touch $(READY)

demo: $(READY) ## Serve a small model, chat, prove, and tell an honest proof from a forged one.
	$(BIN)/proofserve demo

# Two at a time: a starting engine keeps one core busy. Tests of a file share its engine, and those
# with an engine come before the many small ones of the gateway, which fill the end. Threads of torch
# that wait for a core which the other process has would spin, and take four times as long.
test: check ## Run every check and every test (under 15 minutes on two cores).
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

slow: $(READY) ## Run the tests of rare deployments, which `make test` leaves out.
	$(BIN)/python -m pytest -m slow

fuzz: $(READY) ## Send odd requests and hostile bodies to a real node and gateway (five minutes).
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m fuzz --capture=no tests/fuzz

wheel: $(READY) ## Verify from the wheel alone, in a fresh environment that pip fills (minutes).
	$(BIN)/python -m pytest -m slow tests/test_wheel.py

check: $(READY) ## Lint, types, layers. Seconds.
	$(BIN)/ruff check $(PYTHON_FILES)
	$(BIN)/ruff format --check $(PYTHON_FILES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

golden: $(READY) ## Replay the golden vectors (GOLDEN_DIR=folder for your own, GOLDEN_DEVICE=cuda).
	$(BIN)/python -m pytest tests/golden

bench: $(READY) ## Measure generation and chat priority on the small models.
	$(BIN)/proofserve bench generation --size tiny
	$(BIN)/proofserve bench generation --size small
	$(BIN)/proofserve bench chat-priority

bench-gateway: $(READY) ## Measure the gateway beside nginx, the Rust routers and others.
	$(BIN)/python -m benchmarks.gateway

lock: ## Resolve requirements/*.in anew (needs pip-tools in .venv).
	$(BIN)/pip-compile --quiet --no-annotate --strip-extras --no-header --allow-unsafe \
	  --no-emit-find-links --no-emit-index-url --no-emit-trusted-host \
	  --output-file requirements/cpu.lock requirements/cpu.in requirements/dev.in
	# A local build tag is a property of this machine's index, not of the release.
	sed -i 's/+cpu$$//' requirements/cpu.lock

clean: ## Remove what was built and installed here.
	rm -rf $(VENV) build dist .cache src/*.egg-info
