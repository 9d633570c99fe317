"""profile: measure what every node takes, makes and keeps; learns Costs."""

from fxsplit.passes.profile.profile import Profile

__all__ = ["Profile"]
