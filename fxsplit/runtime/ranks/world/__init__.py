"""The ranks of a pipeline, their process groups, and what they must have alike before they begin."""
