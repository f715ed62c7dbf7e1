# One set of commands for people and for CI. `make serve` and `make test` start from a fresh machine with Python >= 3.11.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?= smollm2-135m
FLAGS ?=

.PHONY: install serve test test-all check format soak clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

serve: install
	$(BIN)/varve serve $(MODEL) $(FLAGS)

# Unit tests two files at a time; then the tests that measure and load whole servers, one after another. What fails is run once
# more by itself, visibly: deadlines of real processes depend on what else the machine does. `test` leaves out what is marked
# slow, further cases of what it has a few of; `test-all` does not.
AGAIN := --last-failed --last-failed-no-failures none
WHICH := -m "not slow"
test: install
	$(BIN)/python -m pytest -n 2 --dist loadfile unit_tests || $(BIN)/python -m pytest unit_tests $(AGAIN)
	$(BIN)/python -m pytest $(WHICH) test || $(BIN)/python -m pytest $(WHICH) test $(AGAIN)

test-all: WHICH :=
test-all: test

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

soak: install
	$(BIN)/python test/soak.py

clean:
	rm -rf $(VENV) build *.egg-info
