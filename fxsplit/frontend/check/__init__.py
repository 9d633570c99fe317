"""Check a captured graph against its model."""
