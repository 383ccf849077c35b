# Everything a person or CI does with this repository. `make` lists it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# What resolves and audits the lock files, apart from what they install.
TOOLS := $(VENV)/tools
TOOLS_READY := $(TOOLS)/.ready
TORCH := requirements/torch.lock
HASHED := requirements/cpu.lock requirements/cpu-nodeps.lock
PYTHON_FILES := src tests examples tools scripts run_vllm_gateway.py

# Without the compiled files of an earlier start, each start of a server compiles all of vLLM.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-fleet test slow wheel chaos chaos-fleet soak fuzz auth ssrf disk check
.PHONY: schemas golden bench bench-gateway bench-fleet
.PHONY: gpu matrix models real-gpus soundness exact checks train-model browser pictures lock audit-deps clean

help: ## List these targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## Install everything into .venv (about a minute, once).

$(READY): scripts/setup.py $(TORCH) $(HASHED) requirements/uv.lock pyproject.toml
	@$(PYTHON) scripts/setup.py $(VENV)
	@touch $(READY)

demo: $(READY) ## Serve a small model (MODEL=smollm2: a real one), chat, prove, and tell honest proofs from forged.
	$(BIN)/proofserve demo $(MODEL:%=--model %)

demo-fleet: $(READY) ## A fleet of real servers: one is killed and replaced, one cheats, and the others find it.
	$(BIN)/proofserve fleet demo

# What most processes of the tests import.
IMPORTED := vllm.entrypoints.launchers.api_server.entry, vllm.v1.worker.cpu_worker

# Four at a time: an engine that starts, or waits for a client, leaves a core idle. Tests with an
# engine come before the many small ones of the gateway, which fill the end. Threads of torch that
# wait for a core which another process has would spin, and take four times as long. By itself,
# vLLM would bind the workers of all engines to the same core.
test: $(READY) ## Run every check and every test (some twenty minutes on two cores).
	@# In a fresh .venv four processes would compile the same files: one does, beside the checks.
	@$(BIN)/python -c "import $(IMPORTED)" >/dev/null 2>&1 & \
	  $(MAKE) --no-print-directory check && wait
	OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
	  $(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder

slow: $(READY) ## Run the tests of rare deployments, which `make test` leaves out.
	$(BIN)/python -m pytest -m slow

fuzz: $(READY) ## Send odd requests and hostile bodies to a real node and gateway (five minutes).
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m fuzz --capture=no tests/fuzz

wheel: $(READY) ## Verify from the wheel alone, in a fresh environment that pip fills (minutes).
	$(BIN)/python -m pytest -m slow tests/test_wheel.py

chaos: $(READY) ## Kill servers at random, account for every proof (50 kills, 20 minutes; CHAOS=options).
	$(BIN)/python -m endurance chaos $(CHAOS)

chaos-fleet: $(READY) ## Kill controllers, members, workers and PostgreSQL (30 kills, 5 minutes; CHAOS=options).
	OMP_NUM_THREADS=1 $(BIN)/python -m endurance fleet $(CHAOS)

soak: $(READY) ## Chat and rounds for ten minutes: nothing may fail, grow or leak (SOAK=options).
	$(BIN)/python -m endurance soak $(SOAK)

auth: $(READY) ## Every route of the proof API, by every kind of caller. Seconds.
	$(BIN)/python -m pytest tests/api/test_access.py tests/api/test_validators.py tests/wiring/test_access.py

ssrf: $(READY) ## Callbacks that try to reach what they may not. Seconds.
	$(BIN)/python -m pytest tests/outbox/test_allowlist.py tests/outbox/test_forbidden_targets.py

disk: $(READY) ## A real disk that fills up during a round of a real server (needs root; a minute).
	$(BIN)/python -m pytest -m engine tests/e2e/test_faults.py -k full_disk

check: $(READY) ## Lint, types, layers. Seconds.
	$(BIN)/ruff check $(PYTHON_FILES)
	$(BIN)/ruff format --check $(PYTHON_FILES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

checks: $(READY) ## Run `proofserve check` on real servers of three models (twelve starts, minutes).
	$(BIN)/proofserve check smoke --models trained qwen llama
	$(BIN)/proofserve check coexist --models trained qwen llama
	$(BIN)/proofserve check e2e --models trained qwen llama

matrix: $(READY) ## Start every vetted vLLM on this CPU, and write docs/versions.md (an hour; MATRIX=options).
	OMP_NUM_THREADS=1 $(BIN)/python -m matrix run $(MATRIX)

models: $(READY) ## Serve and judge every family and format on this CPU, and write docs/models.md (MODELS=options).
	OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(BIN)/python -m families run $(MODELS)

real-gpus: $(READY) ## Judge vectors that real GPUs published by each other, and write docs/real-gpus.md (GPUS=folder of more).
	OMP_NUM_THREADS=1 $(BIN)/python -m real_gpus run $(GPUS:%=--folder %)

soundness: $(READY) ## How often `verify` convicts honest nodes and cheats, in docs/soundness.md and its CSV (some two hours; RECORD, EXAMINE=folder).
	$(BIN)/python -m soundness $(if $(RECORD),record $(RECORD),run $(EXAMINE:%=--examine %) $(SOUNDNESS))

exact: $(READY) ## How often the bits of two vLLM servers agree, in docs/exact.md (26 starts, half an hour).
	$(BIN)/python -m soundness exact

schemas: $(READY) ## Write docs/api from the code: OpenAPI of our servers, JSON Schemas of what they send.
	$(BIN)/python -m scripts.schemas

golden: $(READY) ## Replay the golden vectors (GOLDEN_DIR=folder for your own, GOLDEN_DEVICE=cuda).
	$(BIN)/python -m pytest tests/golden

# With the host's own torch and vLLM, not those of .venv, if PYTHON has them.
gpu: ## Measure a host with a GPU, 20 minutes at most (MODEL=checkpoint, WHEELS=folder without an index, GPU=options).
	@$(PYTHON) scripts/gpu.py $(if $(WHEELS),--wheels $(WHEELS)) $(MODEL:%=--model %) $(GPU)

browser: $(READY) ## Install Chromium for the tests of the dashboard; says what it does.
	@$(BIN)/python scripts/browser.py

pictures: browser ## Take the screenshots of docs/images anew, by the tests of the dashboard (a minute).
	PICTURES=docs/images $(BIN)/python -m pytest tests/dashboard -k browser

# A thread that waits for another one would spin, and its time would count as work.
train-model: $(READY) ## Train both small models into .cache (half an hour; MODEL=trained or trained_moe for one).
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m training .cache $(MODEL:%=--model %)

bench: $(READY) ## Measure generation and chat priority on the small models.
	$(BIN)/proofserve bench generation --size tiny
	$(BIN)/proofserve bench generation --size small
	$(BIN)/proofserve bench chat-priority

bench-gateway: $(READY) ## Measure the gateway beside nginx, the Rust routers and others.
	$(BIN)/python -m benchmarks.gateway

bench-fleet: $(READY) ## Measure a controller with 200 members (two minutes; BENCH=options).
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.fleet scale $(BENCH)

# Adds hashes of every build, for other machines and Pythons too. Options of the index are a
# property of this machine.
COMPILE := $(TOOLS)/bin/pip-compile --quiet --no-annotate --strip-extras --no-header --allow-unsafe \
  --generate-hashes --no-emit-find-links --no-emit-index-url --no-emit-trusted-host

lock: $(TOOLS_READY) ## Resolve requirements/*.in anew, with hashes (minutes). Keeps what still fits.
	$(COMPILE) --output-file requirements/cpu.lock requirements/cpu.in requirements/dev.in
	$(COMPILE) --output-file requirements/tools.lock requirements/tools.in
	$(COMPILE) --output-file requirements/uv.lock requirements/uv.in
	# Torch has a lock of its own: see there.
	sed -i '/^torch==/,/[^\\]$$/d' requirements/cpu.lock

# Strict, for what the service does not know would pass for clean otherwise.
AUDIT := $(TOOLS)/bin/pip-audit --strict --disable-pip --progress-spinner off

audit-deps: $(TOOLS_READY) ## Ask PyPI for known vulnerabilities in what the locks install.
	@$(AUDIT) --require-hashes $(HASHED:%=--requirement %) \
	  && $(AUDIT) --no-deps --requirement $(TORCH) \
	  || { echo "audit-deps: not clean. Above stands a table of vulnerabilities; or none, and then" \
	  "the service could not be asked, or lacks a package, and nothing was found out." >&2; exit 1; }

$(TOOLS_READY): requirements/tools.lock
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip --disable-pip-version-check install --no-deps --require-hashes \
	  --requirement requirements/tools.lock
	@touch $(TOOLS_READY)

clean: ## Remove what was built and installed here.
	rm -rf $(VENV) build dist .cache src/*.egg-info
