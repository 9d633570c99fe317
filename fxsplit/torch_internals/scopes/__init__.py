"""Temporary changes that are restored after a block: torch's modes, patched methods, logging."""
