"""Messages between stages on different ranks: their layout and their order."""
