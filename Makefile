# Limpet. Needs Python 3.11 or newer with venv, and make. Every target does its own set-up.
#   make demo | make test | make check | make PYTHON=python3.13 test | make test PYTEST="tests/unit -x"

PYTHON ?= python3
PYTEST ?= -n 2 --dist loadgroup
OF     ?= run
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.setup-done
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help setup demo test check crash bench lock wheel clean distclean

help:  ## print the targets
	@awk -F ':.*  ## ' '/^[a-z]+:.*  ## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv with the locked packages and Limpet itself; does nothing where that is done

# The stamp is newer than the locks only after all of this succeeded, so an interrupted set-up is done again.
$(STAMP): requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Limpet needs Python 3.11 or newer, and '$(PYTHON)' is not: name another, as in 'make PYTHON=python3.12 $(or $(MAKECMDGOALS),setup)'" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo "'$(PYTHON)' cannot make virtual environments: install its venv module first (on Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@$(BIN)/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --require-hashes -r requirements/dev.txt
	$(PIP) install --no-deps --no-index --no-build-isolation --editable .
	@touch $@

demo: setup  ## crawl a small shop on loopback, killing the crawler on the way, and show what was collected
	$(BIN)/limpet demo

test: setup  ## the whole suite
	$(BIN)/pytest $(PYTEST)

check: setup  ## what CI runs: style, types, layers and the whole suite
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest $(PYTEST)

crash: setup  ## the long sweeps of kills, power cuts and full disks; resumable (CRASH="--help" shows its options)
	$(BIN)/python -m tests.crash.long $(CRASH)

bench: setup  ## speed, as ratios to a crawler that stores nothing; OF=hosts, OF=snapshot for others (BENCH="--help" shows options)
	$(BIN)/python bench/$(OF).py $(BENCH)

wheel: setup  ## dist/limpet-*.whl
	$(BIN)/hatchling build --target wheel

# With the oldest Python, whose packages are those of every newer one and a few more. No file may name the index that the
# packages came from: any mirror serves them, and the hashes hold. UPGRADE=--upgrade takes the newest versions.
COMPILE = CUSTOM_COMPILE_COMMAND="make lock" build/lock/bin/pip-compile --quiet --generate-hashes --strip-extras --allow-unsafe \
	--no-emit-index-url --no-emit-trusted-host --no-emit-find-links --no-emit-options $(UPGRADE)

lock:  ## make requirements/*.txt anew from pyproject.toml and requirements/*.in
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "locks are made with Python 3.11: make PYTHON=python3.11 lock" >&2; exit 1; }
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip --disable-pip-version-check --quiet install --require-hashes -r requirements/lock.txt
	$(COMPILE) --all-extras --output-file requirements/dev.txt pyproject.toml requirements/dev.in
	$(COMPILE) --constraint requirements/dev.txt --output-file requirements/runtime.txt pyproject.toml
	$(COMPILE) --output-file requirements/lock.txt requirements/lock.in

clean:  ## remove what builds, tests and checks leave behind
	rm -rf build dist .crash .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -prune -exec rm -rf {} +

distclean: clean  ## the same, and .venv
	rm -rf $(VENV)
