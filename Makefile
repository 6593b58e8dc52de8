# `make help` lists the targets. Everything runs in .venv, which `make setup` builds once and after each change of
# requirements/*.lock or pyproject.toml.

PYTHON ?= python3
TORCH_INDEX ?=
WORKERS ?= 3
PYTEST_ARGS ?=
DEMO_ARGS ?=
ATTACK_ARGS ?=
FUZZ_ARGS ?=
FUZZ_SECONDS ?= 60
TORTURE_ARGS ?=
SCALE_ARGS ?=
SIMULATION_ARGS ?= --seeds 200
SOAK_ARGS ?=
MUTANTS_ARGS ?=
PEERS_ARGS ?=
ROUNDS ?= 9
JSON ?=
PLOT ?=
ENGINE_TESTS ?= engine

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ENGINES := .venv-engines
# What was run whole renews the table of engines. The argument: the report that pytest wrote.
RENEW = $(if $(PYTEST_ARGS)$(filter-out engine,$(ENGINE_TESTS)),,$(BIN)/python -m tests.engines.compatibility $(1))
OVERLAYS := $(wildcard .venv-sglang/.installed .venv-lmcache/.installed .venv-vllm-tier/.installed)
LOCKS := requirements/dev.lock requirements/torch.lock
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --no-compile
# C16, F06, I16, L02, L03, L05 to L08, S02, S05, S18, S24, R09, R49, R69, R77: with the figures that docs/tests.md keeps.
LONG := tests/torture tests/crash tests/test_mutants.py tests/test_branches.py tests/engines/test_vllm_lives.py \
	tests/kvgw/test_load.py tests/kvgw/test_herd.py tests/kvgw/test_decoders_fuzzed.py $(wildcard tests/kvgw/test_cases_*.py) \
	tests/tenancy/test_parsers_fuzzed.py tests/tenancy/test_catalog_large.py
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -rs $(PYTEST_ARGS)

# What stands in docker-compose.yml. COMPOSE_SECRETS is a folder private to you; compose-up makes what is missing there.
COMPOSE ?= docker compose
COMPOSE_ARGS ?=
COMPOSE_SECRETS ?= $(CURDIR)/deploy/secrets
MINIO_PORT ?= 9000
MINIO_USER ?= kvgw-minio
POSTGRES_PORT ?= 5432
STACK := KVGW_COMPOSE_SECRETS='$(COMPOSE_SECRETS)' KVGW_COMPOSE_MINIO_PORT=$(MINIO_PORT) KVGW_COMPOSE_MINIO_USER=$(MINIO_USER) \
	KVGW_COMPOSE_POSTGRES_PORT=$(POSTGRES_PORT) $(COMPOSE)

.DEFAULT_GOAL := help
.PHONY: help setup setup-engines test test-all test-engines test-sglang test-lmcache test-vllm-tier soak mutants attacks fuzz torture torture-slice torture-long simulation torture-gateways bench-gateways bench-peers demo demo-vllm lint types docs clean compose-up compose-test compose-down

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12   the interpreter of a new environment (3.11 to 3.13)"
	@echo "  TORCH_INDEX=URL     where pip finds PyTorch's CPU wheels; without it Linux gets the far larger CUDA build"
	@echo "  PYTEST_ARGS='…'     more arguments for pytest; WORKERS=N its processes; DEMO_ARGS='…' for the demo"
	@echo "  COMPOSE_ARGS='…'    more arguments for docker compose; COMPOSE='docker compose --profile monitoring' adds Prometheus"

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

setup-engines: $(ENGINES)/.installed .venv-sglang/.installed .venv-lmcache/.installed .venv-vllm-tier/.installed ## Build the environments of all engines

test-engines: $(STAMP) $(ENGINES)/.installed ## The adapters inside real engines on the CPU; ENGINE_TESTS=smoke: six minutes of it
	KVGW_TEST_VLLM='$(CURDIR)/$(ENGINES)/bin/python' $(BIN)/python -m pytest -rs -m '$(ENGINE_TESTS)' --junitxml=build/engines/vllm.xml $(PYTEST_ARGS) tests/engines
	$(if $(filter engine,$(ENGINE_TESTS)),$(BIN)/python -m pytest -rs --junitxml=build/engines/others.xml $(PYTEST_ARGS) tests/engines/test_transformers.py tests/engines/test_vllm_conformance.py)
	$(call RENEW,build/engines/vllm.xml build/engines/others.xml)
	$(if $(OVERLAYS),$(MAKE) $(OVERLAYS:.venv-%/.installed=test-%))

test-sglang: .venv-sglang/.installed ## SGLang's storage backend in the released SGLang, without a GPU
	.venv-sglang/bin/python -m pytest -rs -W default -m '$(ENGINE_TESTS)' --junitxml=build/engines/sglang.xml $(PYTEST_ARGS) tests/engines/test_sglang.py
	$(call RENEW,build/engines/sglang.xml)

test-lmcache: .venv-lmcache/.installed ## LMCache's L2 adapter in the released LMCache, without a GPU
	.venv-lmcache/bin/python -m pytest -rs -W default -m '$(ENGINE_TESTS)' --junitxml=build/engines/lmcache.xml $(PYTEST_ARGS) tests/engines/test_lmcache.py tests/engines/test_lmcache_storage.py
	$(call RENEW,build/engines/lmcache.xml)

test-vllm-tier: .venv-vllm-tier/.installed ## vLLM's secondary tier in the released vLLM, without a GPU
	.venv-vllm-tier/bin/python -m pytest -rs -W default -m '$(ENGINE_TESTS)' --junitxml=build/engines/vllm-tier.xml $(PYTEST_ARGS) tests/engines/test_vllm_tier.py
	$(call RENEW,build/engines/vllm-tier.xml)

# Over the developers' environment: what is needed besides comes first on the path, the rest is there.
define OVERLAY
@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
@rm -f $(@D)/lib/python*/site-packages/developers.pth
@echo "setup: $< in $(@D)"
@$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --no-deps -r $<
@for folder in $(CURDIR)/$(VENV)/lib/python*/site-packages; do echo "$$folder"; done > $(@D)/developers
@for folder in $(@D)/lib/python*/site-packages; do mv $(@D)/developers "$$folder/developers.pth"; done
@touch $@
endef

.venv-%/.installed: requirements/engines-%.lock $(STAMP)
	$(OVERLAY)

.venv-fuzz/.installed: requirements/fuzz.lock $(STAMP)
	$(OVERLAY)

$(ENGINES)/.installed: requirements/engines-vllm.lock
	@test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	@echo "setup: vLLM (requirements/engines-vllm.lock), about 2.5 GB in $(ENGINES)"
	@$(ENGINES)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --no-deps $(TORCH_INDEX:%=--extra-index-url %) -r $<
	@# torch brings a file in the syntax of a newer Python, which fails here and is imported by nothing.
	@$(ENGINES)/bin/python -m compileall -q -j 2 -x py312_intrinsics $(ENGINES)/lib
	@touch $@

soak: $(STAMP) ## Half an hour of mixed load, watched for what should not grow; SOAK_ARGS
	$(BIN)/python -m tests.soak $(SOAK_ARGS)

attacks: $(STAMP) ## The same eight attacks on kvgw, LMCache, Redis and Mooncake, side by side; installs them. ATTACK_ARGS
	$(BIN)/python -m tests.attacks $(ATTACK_ARGS)

fuzz: .venv-fuzz/.installed ## Every parser of foreign bytes under a coverage-guided fuzzer, FUZZ_SECONDS=60 for each
	.venv-fuzz/bin/python -m tests.fuzz --seconds $(FUZZ_SECONDS) $(FUZZ_ARGS)

torture: $(STAMP) ## Twenty minutes of kills and faults by the thousand, and what must hold all the same; JSON=FILE
	$(BIN)/python -m tests.torture.run $(JSON:%=--json '%') $(TORTURE_ARGS)

torture-slice: $(STAMP) ## Three minutes of it
	$(BIN)/python -m tests.torture.run --seconds 80 $(JSON:%=--json '%') $(TORTURE_ARGS)

torture-long: $(STAMP) ## Three hours of it, 2,000 seeds of the simulation, half an hour of soak, and what the test catalogue has slow tests for
	$(BIN)/python -m tests.torture.run --seconds 10800 $(JSON:%=--json '%') $(TORTURE_ARGS)
	$(BIN)/python -m tests.simulation --seeds 2000 --processes 2
	$(BIN)/python -m tests.soak
	KVGW_TEST_ROWS=1000000 KVGW_TEST_FUZZ=1000000 KVGW_TEST_MUTANTS=100 $(BIN)/python -m pytest -rs -s $(PYTEST_ARGS) $(LONG)

mutants: $(STAMP) ## Small changes of the modules that nothing may be wrong in: do the tests notice? MUTANTS_ARGS=--all
	$(BIN)/python -m tests.support.mutants $(MUTANTS_ARGS)

simulation: $(STAMP) ## Gateways, disks, S3 and catalog on a virtual clock, everything from a seed; SIMULATION_ARGS='7' shows seed 7
	$(BIN)/python -m tests.simulation $(SIMULATION_ARGS)

torture-gateways: $(STAMP) ## Five minutes of three gateways over one PostgreSQL and one S3, one killed every 20 s
	$(BIN)/python -m tests.torture.three_gateways $(TORTURE_ARGS)

bench-gateways: $(STAMP) ## GET throughput through 1, 2 and 4 gateway processes over one PostgreSQL and one S3
	$(BIN)/python -m tests.scale_gateways $(SCALE_ARGS)

bench-peers: $(STAMP) ## Beside Redis, memcached, LMCache, Mooncake and S3 clients; installs them. JSON=FILE, PLOT=FILE, ROUNDS=9
	$(BIN)/python -m tests.bench_peers --rounds $(ROUNDS) $(JSON:%=--json '%') $(PLOT:%=--plot '%') $(PEERS_ARGS)

demo: $(STAMP) ## The demo: a real language model over a gateway, no service needed
	$(BIN)/python docs/demo/demo.py $(DEMO_ARGS)

demo-vllm: $(STAMP) $(ENGINES)/.installed ## The demo with vLLM: two of its servers, one after the other, share long documents
	$(BIN)/python docs/demo/demo_vllm.py $(DEMO_ARGS)

lint: $(STAMP) ## Lint, format and layers only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP) ## Types only
	$(BIN)/mypy

docs: $(STAMP) ## Write docs/settings.md, metrics.md, tests.md and cases.md anew from the code and the tests
	$(BIN)/python docs/generate.py
	$(BIN)/python -m tests.support.catalogue

compose-up: ## MinIO, PostgreSQL and two gateways in Docker, with secrets of their own
	sh deploy/secrets.sh '$(COMPOSE_SECRETS)'
	$(STACK) up --detach --build --wait $(COMPOSE_ARGS)

compose-test: $(STAMP) ## The S3, PostgreSQL and contract suites against the MinIO and PostgreSQL of docker-compose.yml
	sh deploy/secrets.sh '$(COMPOSE_SECRETS)'
	$(STACK) up --detach --wait minio db
	KVGW_TEST_S3_ENDPOINT=http://127.0.0.1:$(MINIO_PORT) KVGW_TEST_S3_BUCKET=kvgw-tests \
	KVGW_TEST_S3_ACCESS_KEY=$(MINIO_USER) KVGW_TEST_S3_SECRET_KEY="$$(cat '$(COMPOSE_SECRETS)/minio-password')" \
	KVGW_TEST_S3_REGION=us-east-1 KVGW_TEST_S3_ADDRESSING=path KVGW_TEST_S3_CHECKSUMS=when_required \
	KVGW_TEST_POSTGRES_URL="postgresql://postgres:$$(cat '$(COMPOSE_SECRETS)/db-admin-password')@127.0.0.1:$(POSTGRES_PORT)/postgres" \
	$(PYTEST) -m "not slow" -k "s3 or postgres or contract" tests/storage tests/tenancy tests/kvgw

compose-down: ## Stop them; COMPOSE_ARGS=--volumes also deletes what was stored
	$(STACK) down $(COMPOSE_ARGS)

clean: ## Remove what builds and tests leave behind; keeps .venv and the demo's model
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find $(wildcard kvgw tenancy storage migrations tests docs) -name __pycache__ -type d -prune -exec rm -rf {} +
