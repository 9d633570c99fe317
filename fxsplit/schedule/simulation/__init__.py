"""Simulate a schedule: from the time of each action to the time of the step and the memory over it."""
