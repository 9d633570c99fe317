"""The `fxsplit` command, with one file for each subcommand; each imports only the modules it needs."""
