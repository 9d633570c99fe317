"""The loss of a batch from those of its microbatches, and what a loss function means by rows."""
