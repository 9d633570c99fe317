"""The loss of a batch from the losses of its microbatches, and how a loss function reduces rows."""
