"""Checks and measurements for a machine with one GPU: `python -m bench.gpu COMMAND [--dry]`, see README.md."""
