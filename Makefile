PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo test test-long quick room lint types docs outputs check bench dist clean

help:
	@echo "make demo       train ResNet-18 as a pipeline on real images"
	@echo "make test       the tests, in two processes"
	@echo "make test-long  the tests that take long"
	@echo "make quick      lint, types, and the tests of rooms changed since the commit before the last (BASE=HEAD~1)"
	@echo "make room       the tests of one room: make room ROOM=planner"
	@echo "make lint       ruff: rules and format"
	@echo "make types      mypy, strict"
	@echo "make docs       the pages as a site in build/docs"
	@echo "make outputs    rewrite the outputs that a page shows: make outputs PAGE=docs/tour.md"
	@echo "make check      all that CI runs"
	@echo "make bench      the tables of bench/README.md"
	@echo "make dist       wheel and sdist in dist/"
	@echo "make clean      remove .venv and what was built"

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch --editable '.[dev]'
	touch $@

demo: .venv/ready
	$(BIN)/fxsplit demo

# Every test is in one of the two: sweeps and whole trainings carry the marker `long`, all else is run at every change.
test: .venv/ready
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not long" --durations 25

.venv/long: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch --editable '.[dev,long]'
	touch $@

test-long: .venv/long
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m long --durations 25

BASE ?= HEAD~1
quick: lint types
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not long" $$($(BIN)/python -m tests.support.rooms $(BASE))

room: .venv/ready
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal tests/$(ROOM)

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready
	$(BIN)/mypy

docs: .venv/ready
	$(BIN)/mkdocs build --strict --site-dir build/docs

outputs: .venv/ready
	$(BIN)/python -m tests.docs.run_page $(PAGE)

check: test test-long lint types docs

bench: .venv/ready
	mkdir -p .benchmarks
	$(BIN)/python -m pytest bench/bench_*.py --benchmark-only --benchmark-json=.benchmarks/latest.json
	$(BIN)/python -m bench.lib.report .benchmarks/latest.json

dist: .venv/ready
	$(BIN)/python -m build

clean:
	rm -rf .venv build dist *.egg-info
