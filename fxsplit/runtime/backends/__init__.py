"""Backends own the workers: they run jobs on all devices, stop them on Ctrl-C, and end with the pipeline."""
