"""Find the kind of each output of a model over microbatches: rows, mean, sum, count, or not joinable."""
