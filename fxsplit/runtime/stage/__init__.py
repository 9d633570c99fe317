"""A stage as one device runs it."""
