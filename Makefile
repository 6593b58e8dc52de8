# `make help` lists the targets. Everything runs in .venv, which `make setup` builds once and after each change of
# requirements/*.lock or pyproject.toml.

PYTHON ?= python3
TORCH_INDEX ?=
WORKERS ?= 2
PYTEST_ARGS ?=
DEMO_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOCKS := requirements/dev.lock requirements/torch.lock
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --no-compile
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -rs $(PYTEST_ARGS)

.DEFAULT_GOAL := help
.PHONY: help setup test test-all demo lint types clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12   the interpreter of a new environment (3.11 to 3.13)"
	@echo "  TORCH_INDEX=URL     where pip finds PyTorch's CPU wheels; without it Linux gets the far larger CUDA build"
	@echo "  PYTEST_ARGS='…'     more arguments for pytest; WORKERS=N its processes; DEMO_ARGS='…' for the demo"

setup: $(STAMP) ## Build the environment in .venv, if it is not there or out of date

$(STAMP): $(LOCKS) pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; (3, 11) <= v[:2] <= (3, 13) or sys.exit("kvgw needs Python 3.11 to 3.13, and $(PYTHON) is %d.%d; name another one: make setup PYTHON=python3.12" % v[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setup: libraries and tools (requirements/dev.lock)"
	@$(INSTALL) --no-deps -r requirements/dev.lock
	@echo "setup: torch (requirements/torch.lock)"
	@$(INSTALL) $(TORCH_INDEX:%=--extra-index-url %) -c requirements/dev.lock -r requirements/torch.lock
	@echo "setup: kvgw, editable"
	@$(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

test: $(STAMP) ## Lint, types, layers and all tests but the slow ones
	$(PYTEST) -m "not slow"

test-all: $(STAMP) ## The same with the slow tests
	$(PYTEST)

demo: $(STAMP) ## The demo: a real language model over a gateway, no service needed
	$(BIN)/python docs/demo/demo.py $(DEMO_ARGS)

lint: $(STAMP) ## Lint, format and layers only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP) ## Types only
	$(BIN)/mypy

clean: ## Remove what builds and tests leave behind; keeps .venv and the demo's model
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find $(wildcard kvgw tenancy storage migrations tests docs) -name __pycache__ -type d -prune -exec rm -rf {} +
