# One set of commands for people and for CI. `make serve` and `make test` start from a fresh machine with Python >= 3.11.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?= smollm2-135m
FLAGS ?=

.PHONY: install serve test check format soak clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

serve: install
	$(BIN)/varve serve $(MODEL) $(FLAGS)

# Unit tests, and tests of servers with tiny models, two files at a time; then, one after another, those that load real weights,
# measure, or give a server seconds to come back. What fails is run once more by itself, visibly: deadlines of real processes
# depend on what else the machine does.
AGAIN := --last-failed --last-failed-no-failures none
TINY := test/api test/cache test/benchmark/test_bench_serve.py
ALONE := test/accuracy test/chaos test/benchmark/test_real_server.py
test: install
	$(BIN)/python -m pytest -n 2 --dist loadfile unit_tests || $(BIN)/python -m pytest unit_tests $(AGAIN)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(TINY) || $(BIN)/python -m pytest $(TINY) $(AGAIN)
	$(BIN)/python -m pytest $(ALONE) || $(BIN)/python -m pytest $(ALONE) $(AGAIN)

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
