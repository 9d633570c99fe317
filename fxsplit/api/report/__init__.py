"""Gather what a report tells about a plan: its simulated step, the next best cuts, and plans for other machines."""
