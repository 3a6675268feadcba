# Two commands on a fresh machine: `make run` writes a story with the bundled demo model, `make test` runs every test.
# Needed: Python 3.10 or later with venv, and a C++20 compiler.

PYTHON ?= python3
EXTRAS ?= test
VENV := .venv
BIN := $(VENV)/bin
SOURCES := setup.py pyproject.toml lily/_cpu.pyx $(wildcard kernels/cpu/*)
CPP := $(wildcard kernels/*/*.h kernels/*/*.cc plugins/*/*/*.cc)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: run test lint format clean

run: $(VENV)/.installed
	$(BIN)/lily run -p "Tell me a story about a fox."

test: $(VENV)/.installed-$(EXTRAS)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP)

format: $(VENV)/.installed-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

clean:
	rm -rf build dist *.egg-info lily/*.so $(VENV)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Compiled objects stay in build/, so that only the first of these compiles everything.
$(VENV)/.installed: $(BIN)/python $(SOURCES)
	$(PIP) --editable .
	touch $@

$(VENV)/.installed-%: $(BIN)/python $(SOURCES)
	$(PIP) --editable ".[$*]"
	touch $@ $(VENV)/.installed
