# Every target sees to what it needs: on a fresh machine `make demo` or `make test` alone is enough.
# Only the environment, made once from requirements.lock, and `lock` use the network.

PYTHON ?= python3
PYTEST_ARGS ?=
# Most tests wait for processes: two at once halve the time on two cores.
TEST_WORKERS ?= 2

PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
CODE := $(wildcard harness services clients deploy tests benchmarks examples)
PROTOS := $(sort $(shell find proto/unreal_agent -name '*.proto'))
SUITES := unit contract integration e2e faults

# Stamps: what the lock holds is installed, the code is generated, the project itself is installed.
ENVIRONMENT := .venv/.environment
GENERATED := proto/unreal_agent/.generated
INSTALLED := .venv/.installed
READY := $(GENERATED) $(INSTALLED)
# What clients/node needs, where there is npm: its test runs from here, and the source stays clean.
NODE_MODULES := .venv/node/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo proto docs fmt lint types test test-long $(SUITES:%=test-%) kill-matrix check breaking certs image up down bench bench-quick lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-17s %s\n", $$1, $$2 }' Makefile

install: $(READY) ## create .venv from requirements.lock and install the project into it

demo: $(READY) ## do the main job once, with no key and no network
	@$(PY) -m examples.demo

proto: $(ENVIRONMENT) ## generate the Python code of the schemas
	$(PY) proto/codegen.py

docs: $(READY) ## write docs/protocol.md from the comments of the schemas
	$(PY) proto/protocol_docs.py

fmt: $(READY) ## format code and schemas
	$(PY) -m ruff check --fix-only --quiet .
	$(PY) -m ruff format .
	.venv/bin/buf format --write proto

lint: $(READY) ## check style, import directions and schemas
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	.venv/bin/lint-imports
	.venv/bin/buf lint proto
	.venv/bin/buf format --diff --exit-code proto

types: $(READY) ## check types with mypy --strict
	$(PY) -m mypy --strict $(CODE) proto/codegen.py proto/protocol_docs.py

test: $(READY) ## run all tests but the live ones
	$(PY) -m pytest -n $(TEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

test-unit: $(READY) ## run the tests of pure code
test-contract: $(READY) ## run one suite over each interface's local and remote implementation
test-integration: $(READY) ## run the tests of single services
test-e2e: $(READY) ## run the tests of the whole, as its users see it
test-faults: $(READY) ## run the tests with failures and kills at each commit point
$(SUITES:%=test-%):
	$(PY) -m pytest tests/$(@:test-%=%) $(PYTEST_ARGS)

test-long: $(READY) ## run the long forms of suites whose short forms `make test` runs
	$(PY) -m pytest -m long $(PYTEST_ARGS)

KILLS ?= 1000
SEED ?=
kill-matrix: $(READY) ## kill every process at every fault point and at random times, and check what is left; KILLS, SEED
	$(PY) -m tests.faults.kill_matrix --kills $(KILLS) $(SEED:%=--seed %)

check: lint types test ## do all that CI does

breaking: $(READY) ## compare the schemas with those of the branch main
	.venv/bin/buf breaking proto --against '.git#branch=main,subdir=proto'

certs: $(READY) ## make or renew certificates for development, in deploy/certs
	$(PY) -m deploy.certificates deploy/certs

# BASE and SOURCE_DATE_EPOCH may be given; the base image is the one thing that comes from elsewhere.
ENGINE ?= docker
BASE ?= python:3.11-slim
IMAGES := session-store operation-manager coordinator
image: ## build an image for each service; ENGINE, BASE
	for target in $(IMAGES); do $(ENGINE) build --target $$target --tag unreal-agent-$$target --file deploy/Dockerfile \
		--build-arg BASE=$(BASE) --build-arg SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-0} . || exit 1; done

# The containers run as whoever owns the keys; for root, as the images' own user.
COMPOSE_USER := $(shell [ "$$(id -u)" = 0 ] && echo 10001:10001 || echo "$$(id -u):$$(id -g)")
COMPOSE := BASE=$(BASE) UNREAL_AGENT_USER=$(COMPOSE_USER) $(ENGINE) compose --file deploy/compose.yaml
up: certs ## start the services in containers, the sandbox apart; ENGINE, BASE
	@[ "$$(id -u)" != 0 ] || chown -R $(COMPOSE_USER) deploy/certs
	$(COMPOSE) up --detach --build --wait
	@echo 'a token for clients: $(ENGINE) compose -f deploy/compose.yaml exec coordinator unreal-agent tokens create --session-store session-store:7777'
	@echo 'then: UNREAL_AGENT_TOKEN=... .venv/bin/unreal-agent run --server localhost:7777 --tls-ca deploy/certs/ca.pem --workspace /workspace'

down: ## end the containers; what they keep stays
	$(COMPOSE) down

bench: $(READY) ## measure everything, about ten minutes; tables, charts and a page in benchmarks/results; BENCH_SUITES, BENCH_NAME
	$(PY) -m benchmarks $(BENCH_SUITES:%=--suites %) $(BENCH_NAME:%=--name %)

bench-quick: $(READY) ## run every benchmark for a moment: shows that they work, measures nothing
	$(PY) -m benchmarks --size quick --name quick

lock: $(ENVIRONMENT) ## choose the newest versions that pyproject.toml allows
	$(PIP) install --upgrade uv
	$(PY) -m uv pip compile pyproject.toml --group dev --extra bench --universal --generate-hashes --no-emit-index-url --no-header \
		--upgrade --quiet -o requirements.lock

clean: ## remove what was generated, built or cached; .venv stays
	find proto/unreal_agent -type f ! -name '*.proto' -delete
	rm -rf proto/.codegen-* build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name .venv -prune -o -name __pycache__ -exec rm -rf {} +

$(ENVIRONMENT): requirements.lock
	@$(PIP) --version >/dev/null 2>&1 || { \
		$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
			echo '$(PYTHON) is not Python 3.11 or newer; name one that is: make PYTHON=python3.12 ...' >&2; exit 1; }; \
		$(PYTHON) -m venv --clear .venv >/dev/null 2>&1 || { rm -rf .venv; \
			echo '`$(PYTHON) -m venv` failed; on Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }; }
	$(PIP) install --no-deps --require-hashes -r requirements.lock
	@touch $@

# A schema that went away leaves no newer file behind, so the stamp holds their names.
ifneq ($(PROTOS),$(shell cat $(GENERATED) 2>/dev/null))
.PHONY: $(GENERATED)
endif
$(GENERATED): $(PROTOS) proto/codegen.py $(ENVIRONMENT)
	$(PY) proto/codegen.py
	@echo '$(PROTOS)' > $@

test test-integration: $(if $(shell command -v npm),$(NODE_MODULES))
$(NODE_MODULES): clients/node/package-lock.json $(ENVIRONMENT)
	@mkdir -p .venv/node
	cp clients/node/package.json clients/node/package-lock.json clients/node/.npmrc .venv/node
	cd .venv/node && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

$(INSTALLED): pyproject.toml $(ENVIRONMENT) | $(GENERATED)
	$(PIP) install --no-deps --no-build-isolation --no-index --editable .
	@touch $@
