"""Profiles of fxsplit and of other tools, told apart by what is in the file."""
