"""What the outputs of a model mean over microbatches: rows, means, sums, counts, or what cannot be cut."""
