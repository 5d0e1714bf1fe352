# `make` alone says what there is. The first run sets up what a target needs; later runs find it done.

PYTHON ?= python3
# For bench and test: more arguments, as in  make test ARGS="-k sqlite -x"
ARGS ?=
# Tests at once, each with servers of its own (0.6 GB); auto is what the machine carries (tests/conftest.py).
JOBS ?= auto
# Tests start a thousand Pythons: what was compiled for one is kept for the next, also where that is not the custom.
unexport PYTHONDONTWRITEBYTECODE

venv := .venv/bin/python
# What mypy checks, as far as it is there.
typed := $(wildcard src tests benchmarks examples scripts/*.py)

.DEFAULT_GOAL := help
# Two set-ups in one .venv would tread on each other under make -j.
.NOTPARALLEL:
.PHONY: help demo test bench lint docs clean setup-demo setup-test setup-bench setup-docs

help: ## Show this
	@echo "make TARGET [PYTHON=python3.12] [ARGS=…]"
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 10

demo: setup-demo ## See it work: workers share a feed checker, one is killed, the others take over
	@$(venv) examples/demo.py $(ARGS)

test: setup-test ## Check everything: linters, then all tests, with private servers of their own
	@# Each of the test processes would compile all tests: it is done once, beside the linters, which use one processor.
	@$(venv) -m pytest --collect-only -q > /dev/null & $(MAKE) --no-print-directory lint && wait
	@$(venv) -m pytest -n $(JOBS) --dist worksteal $(ARGS)

bench: setup-bench ## Measure dibs beside the raw driver and its peers (ARGS="--help" shows the choices)
	@$(venv) -m benchmarks $(ARGS)

lint: setup-test ## ruff and mypy
	@$(venv) -m ruff check .
	@$(venv) -m ruff format --check .
	@$(venv) -m mypy $(typed)

docs: setup-docs ## Print the reference pages that are generated from the code
	@$(venv) scripts/print_reference.py $(ARGS)

clean: ## Remove .venv, caches and build output
	@rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

setup-demo:
	@scripts/setup_venv.sh "$(PYTHON)" demo

setup-test:
	@scripts/setup_venv.sh "$(PYTHON)" test,lint,all
	@scripts/setup_servers.sh
	@scripts/setup_mysqlclient.sh

setup-bench:
	@scripts/setup_venv.sh "$(PYTHON)" bench,all
	@scripts/setup_servers.sh
	@scripts/setup_mysqlclient.sh

setup-docs:
	@scripts/setup_venv.sh "$(PYTHON)" all
