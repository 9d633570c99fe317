"""Read and write files: profiles of fxsplit and other tools, machines, plans, weights.

A file is data: fxsplit never runs code from a file.
"""

from fxsplit.formats.profiles.foreign import ProfileFile
from fxsplit.formats.read import read

__all__ = ["ProfileFile", "read"]
