"""The `fxsplit` command, one file for each subcommand; each loads only what it needs."""
