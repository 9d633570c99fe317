"""What the `fxsplit` command does, one file a subcommand; each loads only what it needs."""
