"""Files, read and written: profiles of fxsplit and of other tools, machines, plans, weights.

A file is data: nothing in it is ever run.
"""

from fxsplit.formats.profiles.foreign import Profile
from fxsplit.formats.read import read

__all__ = ["Profile", "read"]
