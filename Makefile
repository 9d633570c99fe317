# make demo: train ResNet-18 as a pipeline on real images.   make test: the tests.   make test-long: the long ones.   make check: what CI runs.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-long lint types docs check bench dist clean

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch --editable '.[dev]'
	touch $@

demo: .venv/ready
	$(BIN)/fxsplit demo

# Every test is in one of the two: sweeps and whole trainings carry the marker `long`, all else is run at every change.
test: .venv/ready
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not long"

.venv/long: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch --editable '.[dev,long]'
	touch $@

test-long: .venv/long
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m long

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready
	$(BIN)/mypy

docs: .venv/ready
	$(BIN)/mkdocs build --strict --site-dir build/docs

check: test test-long lint types docs

bench: .venv/ready
	mkdir -p .benchmarks
	$(BIN)/python -m pytest bench/bench_*.py --benchmark-only --benchmark-json=.benchmarks/latest.json
	$(BIN)/python -m bench.lib.report .benchmarks/latest.json

dist: .venv/ready
	$(BIN)/python -m build

clean:
	rm -rf .venv build dist *.egg-info
