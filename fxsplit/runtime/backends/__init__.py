"""Where workers live. A backend runs jobs on all devices, stops them on Ctrl-C, and ends with the pipeline."""
