"""Hold estimated times against times that others have measured and published."""
