"""Readers of profiles: fxsplit's own, and those of other tools. A file is data: nothing in it is ever run."""

from fxsplit.formats.foreign import Profile
from fxsplit.formats.read import read

__all__ = ["Profile", "read"]
