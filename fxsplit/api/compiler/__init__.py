"""From a model and a call to a program that runs, kept as long as it is right."""
