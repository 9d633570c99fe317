"""The subcommand `doctor`: what a bug report needs, as tables or as one file."""
