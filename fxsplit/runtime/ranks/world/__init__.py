"""The ranks of a pipeline, their process groups, and the checks that all ranks start from the same state."""
