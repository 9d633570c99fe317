"""Movement: microbatches go through the stages, one worker a device."""

from fxsplit.runtime.program import Program

__all__ = ["Program"]
