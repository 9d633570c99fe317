"""The inner loops of the search: arrays in, arrays out. numba compiles these files when they are imported."""
