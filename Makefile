# Oldest, middle and newest supported JAX; the middle and the newest need Python 3.12.
JAX_OLDEST := 0.10.2
JAX_MIDDLE := 0.11.2
JAX_NEWEST := 0.12.0
# The AMD check takes the newest compiler that a Python at hand can install.
JAX_AMD = $(if $(PYTHON_NEW),$(JAX_NEWEST),$(JAX_OLDEST))
AMD_ALL := --arch gfx942,gfx950,gfx90a,gfx1100,gfx1201 --config 0.8b,9b,27b

# The environment of every day: the oldest Python, hence the oldest JAX, so that nothing newer is used unawares.
VENV := .venv
BIN := $(VENV)/bin
PYTHON = $(shell scripts/find_python.sh 3.11 3.12 3.13 3.14)
PYTHON_NEW := $(shell scripts/find_python.sh 3.12 3.13 3.14)

PIP_INSTALL = -m pip install -q --no-input --disable-pip-version-check
PYTEST = -m pytest -q -n 2
PROMPT ?= It is a truth universally acknowledged, that

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-oldest test-newest test-middle test-slow lint format types amd-check amd-check-all amd-tools amd-docs wheel clean

help:
	@echo "make demo      install into $(VENV) and generate text with the shipped model"
	@echo "make test      lint, types and fast tests on JAX $(JAX_OLDEST), a subset on JAX $(JAX_NEWEST), make amd-check"
	@echo "make test-all  make test, the slow tests, the fast tests on JAX $(JAX_MIDDLE), make amd-check-all"
	@echo "make lint      ruff check, ruff format --check"
	@echo "make format    ruff format, and ruff's safe fixes"
	@echo "make types     pyright"
	@echo "make amd-check compile kernels and programs for two AMD GPUs (needs gcc, no GPU)"
	@echo "make amd-check-all   the same for five AMD GPUs, all shapes and three sizes of programs"
	@echo "make amd-docs  make amd-check-all's figures the tables of docs/amd.md"
	@echo "make wheel     build dist/*.whl"
	@echo "make clean     remove environments, caches and build products"

demo: $(VENV)/.stamp-base
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(BIN)/gdnjax generate --prompt "$(PROMPT)"

# One after the other even under make -j: the tests take both cores, and the closing lines stay apart.
test:
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	@$(MAKE) --no-print-directory test-oldest
	@$(MAKE) --no-print-directory test-newest
	@$(MAKE) --no-print-directory amd-check

test-all:
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory test-slow
	@$(MAKE) --no-print-directory test-middle
	@$(MAKE) --no-print-directory amd-check-all

lint: $(VENV)/.stamp-dev-$(JAX_OLDEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.stamp-dev-$(JAX_OLDEST)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(VENV)/.stamp-dev-$(JAX_OLDEST)
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

test-oldest: $(VENV)/.stamp-dev-$(JAX_OLDEST)
	$(BIN)/python $(PYTEST)

test-slow: $(VENV)/.stamp-dev-$(JAX_OLDEST)
	$(BIN)/python $(PYTEST) -m slow

ifneq ($(PYTHON_NEW),)
test-newest: .venv-newest/.stamp-test-$(JAX_NEWEST)
	.venv-newest/bin/python $(PYTEST) -m newest

test-middle: .venv-middle/.stamp-test-$(JAX_MIDDLE)
	.venv-middle/bin/python $(PYTEST)
else
test-newest test-middle:
	@echo "no Python >= 3.12 found: $@ is left out"
endif

amd-check: amd-tools .venv-amd/.stamp-amd-$(JAX_AMD)
	.venv-amd/bin/gdnjax amd-check --arch gfx942,gfx1201 --config 0.8b --quick

amd-check-all: amd-tools .venv-amd/.stamp-amd-$(JAX_AMD)
	.venv-amd/bin/gdnjax amd-check $(AMD_ALL)

# Through a file of its own, so that a check that fails leaves the tables as they are.
amd-docs: amd-tools .venv-amd/.stamp-amd-$(JAX_AMD)
	mkdir -p build
	.venv-amd/bin/gdnjax amd-check $(AMD_ALL) --json > build/amd_check.json
	.venv-amd/bin/python scripts/amd_docs.py build/amd_check.json

# Asked for before an environment of 2 GB is made.
amd-tools:
	@for tool in gcc readelf; do command -v $$tool >/dev/null || { echo "$$tool not found: the AMD check builds" \
	    "stand-ins for ROCm's libraries with it; install gcc and binutils" >&2; exit 1; }; done

wheel: $(VENV)/.stamp-dev-$(JAX_OLDEST)
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .

clean:
	rm -rf .venv .venv-newest .venv-middle .venv-amd build dist .whl .pytest_cache .ruff_cache .hypothesis .jax_cache
	find gdnjax pallas_kernels tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

# Each stamp stands for one set of installed requirements; it is out of date once pyproject.toml changes.
# $(call make_venv,FOLDER,INTERPRETER): an environment that works is kept, whoever made it.
define make_venv
@if ! $(1)/bin/python -m pip --version >/dev/null 2>&1; then \
    if [ -z "$(2)" ]; then echo "no Python >= 3.11 with venv and ensurepip found" >&2; exit 1; fi; \
    echo "$(2) -m venv $(1)"; "$(2)" -m venv $(1); fi
endef

$(VENV)/.stamp-base: pyproject.toml
	$(call make_venv,$(VENV),$(PYTHON))
	$(BIN)/python $(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.stamp-dev-$(JAX_OLDEST): pyproject.toml
	$(call make_venv,$(VENV),$(PYTHON))
	$(BIN)/python $(PIP_INSTALL) -e ".[dev]" "jax==$(JAX_OLDEST)"
	@touch $(VENV)/.stamp-base $@

.venv-newest/.stamp-test-$(JAX_NEWEST): pyproject.toml
	$(call make_venv,.venv-newest,$(PYTHON_NEW))
	.venv-newest/bin/python $(PIP_INSTALL) -e ".[test]" "jax==$(JAX_NEWEST)"
	@touch $@

.venv-middle/.stamp-test-$(JAX_MIDDLE): pyproject.toml
	$(call make_venv,.venv-middle,$(PYTHON_NEW))
	.venv-middle/bin/python $(PIP_INSTALL) -e ".[test]" "jax==$(JAX_MIDDLE)"
	@touch $@

.venv-amd/.stamp-amd-$(JAX_AMD): pyproject.toml
	$(call make_venv,.venv-amd,$(or $(PYTHON_NEW),$(PYTHON)))
	.venv-amd/bin/python $(PIP_INSTALL) --no-compile -e ".[amd]" "jax==$(JAX_AMD)" "jax-rocm7-pjrt==$(JAX_AMD)"
	@rm -f .venv-amd/.stamp-amd-* && touch $@
