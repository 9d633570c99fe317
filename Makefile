PYTHON ?= python3
BIN := .venv/bin

# Tests start many hundred processes, and each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-long test-newest quick room lint types docs outputs golden check bench bench-compare dist clean

help:
	@echo "make demo       train ResNet-18 as a pipeline on real images"
	@echo "make test       the tests, in four processes"
	@echo "make test-long  the tests that take long"
	@echo "make test-newest  the tests of other libraries once more, with the newest torch and releases of them"
	@echo "make quick      lint, types, and the tests beside what changed since the commit before the last (BASE=HEAD~1)"
	@echo "make room       the tests of one room: make room ROOM=planner"
	@echo "make lint       ruff: rules and format"
	@echo "make types      mypy, strict"
	@echo "make docs       the pages as a site in build/docs"
	@echo "make outputs    rewrite the outputs that a page shows: make outputs PAGE=docs/tour.md"
	@echo "make golden     rewrite what the golden files of passes demand"
	@echo "make check      all that CI runs"
	@echo "make bench      the tables of bench/README.md"
	@echo "make bench-compare  benchmarks of ratios; fails if one is 20 % worse than in bench/README.md"
	@echo "make dist       wheel and sdist in dist/"
	@echo "make clean      remove .venv, .newest and what was built"

INSTALL := pip install --quiet --disable-pip-version-check --constraint constraints.txt torch --editable

# The demo needs less than the tests, so .venv has it first.
.venv/demo: pyproject.toml constraints.txt
	@echo "environment: .venv gets torch, torchvision and scikit-learn, once; 1.4 GB with the CPU build of torch"
	@begin=$$(date +%s) && $(PYTHON) -m venv .venv && $(BIN)/$(INSTALL) '.[demo]' && touch $@ && \
		printf '%-50s%6d.0 s\n' environment $$(($$(date +%s) - begin))

.venv/ready: .venv/demo
	$(BIN)/$(INSTALL) '.[dev]'
	touch $@

demo: .venv/demo
	$(BIN)/fxsplit demo

# Every test is in one of the two: sweeps and whole trainings carry the marker `long`, all else is run at every change.
test: .venv/ready
	$(BIN)/python -m pytest --numprocesses 4 --dist worksteal -m "not long" --durations 25

.venv/long: .venv/ready
	$(BIN)/$(INSTALL) '.[dev,long]'
	touch $@

test-long: .venv/long
	$(BIN)/python -m pytest --numprocesses 4 --dist worksteal -m long --durations 25

# An environment of its own: 6 GB, as the newest torch comes with CUDA unless an index has CPU builds.
.newest/ready: pyproject.toml constraints.txt constraints-newest.txt
	$(PYTHON) -m venv .newest
	awk -F== 'NR == FNR {newer[$$1]; print; next} !($$1 in newer)' constraints-newest.txt constraints.txt > .newest/constraints.txt
	.newest/bin/pip install --quiet --disable-pip-version-check --constraint .newest/constraints.txt torch --editable '.[dev,companions]'
	touch $@

test-newest: .newest/ready
	.newest/bin/python -m pytest --numprocesses 4 --dist worksteal -m companions --durations 10

BASE ?= HEAD~1
quick: lint types
	$(BIN)/python -m pytest --numprocesses 4 --dist worksteal -m "not long" $$($(BIN)/python -m tests.support.rooms $(BASE))

room: .venv/ready
	$(BIN)/python -m pytest --numprocesses 4 --dist worksteal tests/$(ROOM)

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready
	$(BIN)/mypy

docs: .venv/ready
	$(BIN)/mkdocs build --strict --site-dir build/docs

golden: .venv/ready
	$(BIN)/python -m tests.proof.golden.run

outputs: .venv/ready
	$(BIN)/python -m tests.docs.run_page $(PAGE)

check: test test-long test-newest lint types docs

bench: .venv/ready
	mkdir -p .benchmarks
	$(BIN)/python -m pytest bench/bench_*.py --benchmark-only --benchmark-json=.benchmarks/latest.json
	$(BIN)/python -m bench.lib.report .benchmarks/latest.json

# By hand, on a machine at rest, and never in CI.
bench-compare: .venv/ready
	mkdir -p .benchmarks
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest bench/bench_runtime.py bench/bench_planner.py --benchmark-only --benchmark-json=.benchmarks/compare.json
	$(BIN)/python -m bench.compare .benchmarks/compare.json

dist: .venv/ready
	$(BIN)/python -m build

clean:
	rm -rf .venv .newest build dist *.egg-info
