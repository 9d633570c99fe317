"""What fxsplit asks of Python and of the system, without torch: files, imports, interrupts, progress, tables."""
