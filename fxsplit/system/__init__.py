"""Services of Python and the operating system, without torch: files, imports, interrupts, progress, tables."""
