"""Tests of fxsplit.frontend.watch."""
