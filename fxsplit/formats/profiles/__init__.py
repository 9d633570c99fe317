"""Profiles of fxsplit and of other tools, recognised by the contents of the file."""
