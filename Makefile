# headway: `make demo` is the whole story on this machine, `make test` the whole truth.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo install test check bench clean

demo: install
	$(BIN)/headway demo -o out/demo

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "headway needs Python 3.11 or newer"'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[runtime,reports]' --group dev
	touch $@

# Real jobs, real packets and a real scheduler want the cores for themselves: they run after the rest, one by one.
test: install
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'not netns and not slurm and not jobs'
	$(BIN)/python -m pytest -n 0 -m 'netns or slurm or jobs' tests/runtime tests/netns tests/slurm

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install
	$(BIN)/python -m pytest -n 0 -o addopts= --import-mode=importlib -s tests/benchmarks
	$(BIN)/python tests/benchmarks/reproductions.py

clean:
	rm -rf $(VENV) out build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
