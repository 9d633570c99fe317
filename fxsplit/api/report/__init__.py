"""Gather the contents of a report about a plan: its simulated step, the next best cuts, and other plans."""
