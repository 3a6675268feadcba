# Two commands on a fresh machine: `make run` writes a story with the bundled demo model, `make test` runs every test.
# Needed: Python 3.10 or later with venv, make, and a C++20 compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := setup.py pyproject.toml lily/_cpu.pyx $(wildcard kernels/cpu/*)

.PHONY: run test lint clean

run: $(VENV)/.installed
	$(BIN)/lily run -p "Tell me a story about a fox."

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf build dist *.egg-info lily/*.so lily/_cpu.cpp $(VENV)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.installed: $(BIN)/python $(SOURCES)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@

$(VENV)/.installed-lint: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable ".[lint]"
	touch $@
