# Every target works on a bare machine. `make setup` builds .venv from hashed requirements. `make setup-engines` builds
# .venv-engines, in which vLLM runs without a GPU, and `make setup-sglang` .venv-sglang with SGLang. `make setup-clients`
# builds .venv-clients with official API clients.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
export UV_PYTHON_DOWNLOADS := never
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes. Without cached bytecode, compiling imports takes more than half of their run time.
unexport PYTHONDONTWRITEBYTECODE

UV_VERSION := 0.13.8
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VENV_ENGINES := .venv-engines
READY_ENGINES := $(VENV_ENGINES)/.ready
VENV_SGLANG := .venv-sglang
READY_SGLANG := $(VENV_SGLANG)/.ready
VENV_CLIENTS := .venv-clients
READY_CLIENTS := $(VENV_CLIENTS)/.ready
VENV_GATEWAY := .venv-gateway
READY_GATEWAY := $(VENV_GATEWAY)/.ready
VENV_CHART := .venv-chart
READY_CHART := $(VENV_CHART)/.ready
VENV_DOCS := .venv-docs
READY_DOCS := $(VENV_DOCS)/.ready
DENO := DENO_DIR=.tools/deno DENO_NO_UPDATE_CHECK=1 $(BIN)/deno
UV := $$(command -v uv || echo .tools/bin/uv)
COMPILE := pip compile --quiet --upgrade --generate-hashes --universal --no-emit-index-url --python-version 3.11
# tensorrt-llm on PyPI only fetches wheels from an index of NVIDIA.
NOT_RESOLVED := tensorrt-llm
PYTHONS := python3.13 python3.12 python3.11 python3
SOURCES := schemas streams services
ARGS ?=
# Processes of pytest: one more than there are cores, because some tests wait.
JOBS ?= $(shell expr $$(nproc) + 1)
# Of `make image`: the command of docker or podman, the base image, and further options of its `build` and `run`.
TOOL ?= $(shell command -v podman || echo docker)
BASE ?=
BUILD ?=
RUN ?=
IMAGE := forebay:$(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
PYTEST = $(BIN)/pytest --numprocesses $(JOBS) --dist worksteal
# These need Kafka and Redis, or vLLM. Each process of pytest starts its own broker and Redis.
# Files start in the given order. xdist would start the file with the fewest tests last, which has the longest test.
REAL = --numprocesses 2 --dist loadfile --no-loadscope-reorder
UNLESS_REAL := --ignore tests/integration --ignore tests/engines --ignore tests/sglang --ignore tests/clients --ignore tests/conformance

.PHONY: help setup setup-engines setup-sglang setup-clients setup-gateway up test test-all explore fuzz fuzz-bugs test-kafka test-engines test-sglang test-clients conformance kafka kafka-stop demo-kafka demo-answers demo-gateway demo-indexer demo-ledger demo-tenants demo-upgrade demo-disagg demo-scaling demo-tiers demo-console chart image docs lint type fmt mutations coverage bench \
    schemas golden report-picture console-pictures lock lock-engines lock-sglang lock-clients resolve ci clean

help: ## show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

setup: $(READY) ## build .venv from the hashed requirements
	@echo 'ready: $(VENV)'

setup-engines: $(READY_ENGINES) ## build .venv-engines: vLLM on the CPU, torch, transformers (Linux x86-64)
	@echo 'ready: $(VENV_ENGINES)'

setup-sglang: $(READY_SGLANG) ## build .venv-sglang: SGLang on the CPU, torch, transformers (Linux x86-64)
	@echo 'ready: $(VENV_SGLANG)'

setup-clients: $(READY_CLIENTS) ## build .venv-clients: official clients of the APIs, for Python and Node
	@echo 'ready: $(VENV_CLIENTS)'

setup-gateway: $(READY_GATEWAY) ## build .venv-gateway: Envoy, for demo-gateway and test-engines
	@echo 'ready: $(VENV_GATEWAY)'

up: $(READY) ## serve in one process with `forebay up`; options in ARGS="..."
	@$(BIN)/forebay up $(ARGS)

test: $(READY) ## run the tests that need no Kafka or engine, without slow ones; options in ARGS="..."
	@$(PYTEST) $(UNLESS_REAL) -m 'not slow' $(ARGS)

test-all: $(READY) ## run all of these tests at full depth, as CI does; options in ARGS="..."
	@$(PYTEST) $(UNLESS_REAL) --hypothesis-profile full $(ARGS)

explore: $(READY) ## search with new Hypothesis examples, many per test; SEED=N repeats a search, options in ARGS="..."
	@seed=$${SEED:-$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}; echo "explore: repeat with SEED=$$seed"; \
	$(PYTEST) $(UNLESS_REAL) --hypothesis-profile explore --hypothesis-seed $$seed -m hypothesis $(ARGS) \
	    || { echo "explore: failed with SEED=$$seed"; exit 1; }

fuzz: $(READY) ## simulate services under injected faults; SEEDS=1000 seeds, or only SEED=n; options in ARGS="..."
	@$(BIN)/python -m tests.faults $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),100)) $(ARGS)

fuzz-bugs: $(READY) ## check that the simulation finds each planted bug; a name in ARGS="..." selects
	@$(BIN)/python -m tests.faults.planted $(ARGS)

test-kafka: $(READY) ## run the tests on real Kafka and Redis (Java 17, Maven); options in ARGS="..."
	@$(BIN)/pytest $(REAL) --numprocesses 3 tests/integration/test_pages.py tests/integration $(ARGS)

test-engines: $(READY_ENGINES) $(READY_GATEWAY) ## run the tests on real vLLM, Envoy, Kafka and Redis; options in ARGS="..."
	@$(VENV_ENGINES)/bin/pytest $(REAL) tests/engines $(ARGS)

test-sglang: $(READY_SGLANG) ## run the tests on real SGLang, which CI does not; options in ARGS="..."
	@$(VENV_SGLANG)/bin/pytest tests/sglang $(ARGS)

test-clients: $(READY_CLIENTS) ## run the tests with official clients of the APIs; options in ARGS="..."
	@$(VENV_CLIENTS)/bin/pytest --confcutdir tests/clients -o filterwarnings=ignore tests/clients $(ARGS)

conformance: $(READY) ## compare the adapters with the engines' packages (package index); VERSIONS=newest, or the pinned ones
	@FOREBAY_CONFORMANCE=$(VERSIONS) $(BIN)/pytest --quiet tests/conformance $(ARGS)

kafka: $(READY) ## start Apache Kafka on the loopback address (Java 17, Maven); options in ARGS="..."
	@$(BIN)/python infra/kafka/kafka.py start $(ARGS)

kafka-stop: $(READY) ## stop the broker that `make kafka` started
	@$(BIN)/python infra/kafka/kafka.py stop $(ARGS)

demo-kafka: $(READY) ## kill a worker and the owner of a distributed system under load (Java 17, Maven); options in ARGS="..."
	@$(BIN)/python -m tests.harness.demo_kafka $(ARGS)

demo-answers: $(READY) ## resume streams after their ingress, the owner and workers were killed (Java 17, Maven); options in ARGS="..."
	@$(BIN)/python -m tests.harness.demo_answers $(ARGS)

demo-gateway: $(READY) $(READY_GATEWAY) ## send requests through a real Envoy to the selected servers (Java 17, Maven); options in ARGS="..."
	@$(BIN)/python -m tests.harness.demo_gateway $(ARGS)

demo-indexer: $(READY) ## kill indexers, owners and workers while two indexers prove their state (Java 17, Maven); options in ARGS="..."
	@$(BIN)/python -m tests.harness.demo_indexer $(ARGS)

demo-ledger: $(READY) ## compare the ledger with what clients counted, while processes are killed (Java 17, Maven); options in ARGS="..."
	@$(BIN)/python -m tests.harness.demo_ledger $(ARGS)

demo-tenants: $(READY) ## give tenants their shares and limits under overload, while Redis is killed (Java 17, Maven)
	@$(BIN)/python -m tests.harness.demo_tenants $(ARGS)

demo-upgrade: $(READY) ## upgrade to a version with other decision rules under load, and back (Java 17, Maven)
	@$(BIN)/python -m tests.harness.demo_upgrade $(ARGS)

demo-disagg: $(READY) ## scale and kill prefill and decode workers under load (Java 17, Maven); options in ARGS="..."
	@$(BIN)/python -m tests.harness.demo_disagg $(ARGS)

demo-scaling: $(READY) ## scale workers by a planner that is killed half-way (Java 17, Maven); options in ARGS="..."
	@$(BIN)/python -m tests.harness.demo_scaling $(ARGS)

demo-tiers: $(READY) ## reuse KV from host memory, disks, a directory and a bucket that fail (Java 17, Maven)
	@$(BIN)/python -m tests.harness.demo_tiers $(ARGS)

demo-console: $(READY) ## run demo-kafka, and look at it in the console (Java 17, Maven); options in ARGS="..."
	@$(BIN)/python -m tests.harness.demo_kafka --console 8100 $(ARGS)

chart: $(READY) $(READY_CHART) ## check the Helm chart with helm, Kubernetes' schemas and checkov (Go)
	@$(BIN)/python infra/helm/check.py
	@$(BIN)/pytest --quiet tests/infra/test_chart.py

image: $(READY) ## build the image with docker or podman, and run it (Java 17, Maven); TOOL, BASE, BUILD, RUN: docs/install.md
	@$(TOOL) build $(if $(BASE),--build-arg BASE=$(BASE)) $(BUILD) --file infra/docker/Dockerfile --target forebay --tag $(IMAGE) .
	@$(BIN)/python -m tests.harness.demo_image $(IMAGE) --tool "$(TOOL)" --run "$(RUN)"

docs: $(READY_DOCS) ## build the documentation as a site in .site, for any browser without a network
	@NO_MKDOCS_2_WARNING=1 $(VENV_DOCS)/bin/mkdocs build --strict --config-file infra/docs/mkdocs.yml
	@echo 'docs: open .site/index.html'

lint: $(READY) ## check style, import layers, spelling and the types of the console's page
	@$(BIN)/ruff check --quiet --output-format concise
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/typos
	@$(BIN)/python -m tests.harness.console_types
	@$(DENO) check --quiet --no-remote --no-npm --config tests/console/types/deno.jsonc services/forebay/console/static/js/app.js

type: $(READY) ## check types with mypy --strict
	@$(BIN)/mypy $(SOURCES) infra tests

fmt: $(READY) ## format the code and apply automatic fixes
	@$(BIN)/ruff format --quiet
	@$(BIN)/ruff check --fix --quiet

mutations: $(READY) ## check that the tests notice each bug of tests/mutations; a name in ARGS="..." selects
	@$(BIN)/python -m tests.mutations $(ARGS)

coverage: $(READY) ## check that events, core, engine_model and kv_tiers have 100 % branch coverage
	@$(BIN)/coverage erase
	@$(PYTEST) --quiet --hypothesis-profile full --cov --cov-report= --cov-fail-under=0 tests/events tests/core tests/kv_tiers $(ARGS)
	@$(BIN)/coverage report

bench: $(READY) ## run a benchmark and print its results; names in ARGS="..."
	@$(BIN)/python -m tests.benchmarks $(ARGS)

schemas: $(READY) ## regenerate schemas, docs/events.md and tables of API fields, add missing wire samples
	@$(BIN)/python -m tests.harness.schemas
	@$(BIN)/python -m tests.harness.samples
	@git status --short -- schemas docs tests/events/samples

golden: $(READY) ## rewrite the recordings of tests/logs after a rule change; names in ARGS="..."
	@$(BIN)/python -m tests.logs.record $(ARGS)

report-picture: $(READY) ## render the README's report picture from the trace in ARGS="..." (Chromium)
	@$(BIN)/python -m tests.harness.report_picture $(ARGS)

console-pictures: $(READY) ## take the pictures of the console in docs/images (Chromium)
	@$(BIN)/python -m tests.harness.console_pictures

cookbook: $(READY) ## run the commands of docs/cookbook.md and update their output
	@$(BIN)/python -m tests.cli.pages

lock: $(READY) lock-engines lock-sglang lock-clients ## update all locked requirements, with hashes
	@$(UV) $(COMPILE) --extra indexer --extra kubernetes --extra planner --group dev pyproject.toml -o requirements/base.txt
	@$(UV) $(COMPILE) requirements/nixl.in --override requirements/nixl-overrides.txt -o requirements/nixl.txt
	@$(UV) $(COMPILE) requirements/gateway.in -o requirements/gateway.txt
	@$(UV) $(COMPILE) requirements/chart.in -o requirements/chart.txt
	@$(UV) $(COMPILE) requirements/docs.in -o requirements/docs.txt

lock-engines: $(READY) ## update the locked requirements of .venv-engines, with hashes
	@$(UV) $(COMPILE) --extra indexer --group build --group test pyproject.toml requirements/engines.in \
	    --override requirements/engines-overrides.txt -o requirements/engines.txt

lock-sglang: $(READY) ## update the locked requirements of .venv-sglang, with hashes
	@$(UV) $(COMPILE) --group build --group test pyproject.toml requirements/sglang.in \
	    --override requirements/sglang-overrides.txt -o requirements/sglang.txt

lock-clients: $(READY) ## update the locked requirements of .venv-clients and the packages of deno.json, with hashes
	@$(UV) $(COMPILE) requirements/clients.in -o requirements/clients.txt
	@cd tests/clients && DENO_DIR=../../.tools/deno ../../$(BIN)/deno outdated --quiet --update --latest

resolve: $(READY) ## check that every extra can be installed, except tensorrt-llm (package index)
	@failed=0; extras=$$($(BIN)/python -c 'import tomllib; \
	    print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"])'); \
	for extra in $$extras; do \
	    if [ $$extra = $(NOT_RESOLVED) ]; then continue; fi; \
	    if count=$$($(UV) pip compile --quiet --no-header --no-annotate --extra $$extra pyproject.toml | wc -l); \
	    then echo "resolve: the extra $$extra needs $$count packages"; \
	    else echo "resolve: the extra $$extra has no solution" >&2; failed=1; fi; \
	done; exit $$failed

ci: ## run all CI checks
	@.ci/run

clean: ## remove everything that make targets built
	@rm -rf $(VENV) $(VENV_ENGINES) $(VENV_SGLANG) $(VENV_CLIENTS) $(VENV_GATEWAY) $(VENV_CHART) $(VENV_DOCS) .site .tools .kafka/lib .mypy_cache .ruff_cache .pytest_cache .hypothesis .fuzz .import_linter_cache .coverage htmlcov dist
	@find $(SOURCES) infra tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): requirements/base.txt requirements/nixl.txt pyproject.toml
	@python=; for candidate in $(PYTHONS); do \
	    if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        python=$$(command -v $$candidate); break; fi; done; \
	if [ -z "$$python" ]; then echo 'forebay requires Python 3.11 or newer; found none among $(PYTHONS)' >&2; exit 1; fi; \
	uv=$$(command -v uv || true); \
	if [ -z "$$uv" ]; then \
	    uv=.tools/bin/uv; \
	    if ! [ -x $$uv ]; then \
	        echo 'setup: fetching uv $(UV_VERSION) into .tools'; \
	        $$python -m venv .tools 2>/dev/null \
	            || { rm -rf .tools; echo 'Python has no venv module: apt install python3-venv' >&2; exit 1; }; \
	        .tools/bin/pip install --quiet 'uv==$(UV_VERSION)'; \
	    fi; \
	fi; \
	echo 'setup: building $(VENV), once'; \
	[ -x $(BIN)/python ] || $$uv venv --quiet --python "$$python" $(VENV); \
	$$uv pip sync --quiet --require-hashes --compile-bytecode --python $(BIN)/python requirements/base.txt requirements/nixl.txt; \
	$$uv pip install --quiet --no-build-isolation --no-deps --python $(BIN)/python --editable .; \
	touch $@

$(READY_ENGINES): $(READY) requirements/engines.txt pyproject.toml tests/harness/free_disk.py
	@$(BIN)/python tests/harness/free_disk.py . "$$($(UV) cache dir)"
	@echo 'setup-engines: building $(VENV_ENGINES), once'
	@[ -x $(VENV_ENGINES)/bin/python ] || $(UV) venv --quiet --python $(BIN)/python $(VENV_ENGINES)
	@$(UV) pip sync --quiet --require-hashes --compile-bytecode --python $(VENV_ENGINES)/bin/python requirements/engines.txt
	@$(UV) pip install --quiet --no-build-isolation --no-deps --python $(VENV_ENGINES)/bin/python --editable .
	@touch $@

$(READY_SGLANG): $(READY) requirements/sglang.txt pyproject.toml tests/harness/free_disk.py infra/sglang/sglang_cpu.py
	@$(BIN)/python tests/harness/free_disk.py . "$$($(UV) cache dir)"
	@echo 'setup-sglang: building $(VENV_SGLANG), once'
	@[ -x $(VENV_SGLANG)/bin/python ] || $(UV) venv --quiet --python $(BIN)/python $(VENV_SGLANG)
	@$(UV) pip sync --quiet --require-hashes --compile-bytecode --python $(VENV_SGLANG)/bin/python requirements/sglang.txt
	@$(UV) pip install --quiet --no-build-isolation --no-deps --python $(VENV_SGLANG)/bin/python --editable .
	@packages=$$($(VENV_SGLANG)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	cp infra/sglang/sglang_cpu.py "$$packages"; echo 'import sglang_cpu' > "$$packages/sglang_cpu.pth"
	@touch $@

$(READY_CLIENTS): $(READY) requirements/clients.txt tests/clients/deno.json tests/clients/deno.lock
	@echo 'setup-clients: building $(VENV_CLIENTS), once'
	@[ -x $(VENV_CLIENTS)/bin/python ] || $(UV) venv --quiet --python $(BIN)/python $(VENV_CLIENTS)
	@$(UV) pip sync --quiet --require-hashes --compile-bytecode --python $(VENV_CLIENTS)/bin/python requirements/clients.txt
	@$(DENO) install --quiet --frozen --config tests/clients/deno.json
	@touch $@

$(READY_GATEWAY): $(READY) requirements/gateway.txt
	@echo 'setup-gateway: building $(VENV_GATEWAY), once'
	@[ -x $(VENV_GATEWAY)/bin/python ] || $(UV) venv --quiet --python $(BIN)/python $(VENV_GATEWAY)
	@$(UV) pip sync --quiet --require-hashes --python $(VENV_GATEWAY)/bin/python requirements/gateway.txt
	@touch $@

$(READY_CHART): $(READY) requirements/chart.txt
	@echo 'chart: building $(VENV_CHART), once'
	@[ -x $(VENV_CHART)/bin/python ] || $(UV) venv --quiet --python $(BIN)/python $(VENV_CHART)
	@$(UV) pip sync --quiet --require-hashes --python $(VENV_CHART)/bin/python requirements/chart.txt
	@touch $@

$(READY_DOCS): $(READY) requirements/docs.txt
	@echo 'docs: building $(VENV_DOCS), once'
	@[ -x $(VENV_DOCS)/bin/python ] || $(UV) venv --quiet --python $(BIN)/python $(VENV_DOCS)
	@$(UV) pip sync --quiet --require-hashes --python $(VENV_DOCS)/bin/python requirements/docs.txt
	@touch $@
