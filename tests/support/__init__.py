"""Shared code of the tests: models, graphs, ranks in processes of their own, stated times, interrupts."""
