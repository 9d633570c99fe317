"""Generators of schedules: a function for each kind, list scheduling, and the catalogue of names."""
