"""Shared code of the benchmarks: networks and profiles to measure, competitors to compare with, and the tables."""
