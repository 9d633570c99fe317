"""Benchmarks on pytest-benchmark; `python -m bench.lib.report FILE` turns their JSON into the README's tables."""
