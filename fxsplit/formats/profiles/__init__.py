"""Read the profiles of fxsplit and of other tools. The contents of a file decide which format it has."""
