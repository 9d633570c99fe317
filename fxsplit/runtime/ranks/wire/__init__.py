"""Messages between stages on different ranks: what they consist of, in which order they come."""
