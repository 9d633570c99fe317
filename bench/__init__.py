"""Benchmarks on pytest-benchmark; `python -m bench.report FILE` turns their JSON into the README's tables."""
