"""torch.compile: what it makes of code, what it compiles stages with, and what it has to leave as it is."""
