"""A terminal for tests that draw progress bars."""

from __future__ import annotations

import io
import threading


class Terminal(io.StringIO):
    """A terminal that reports when a text has been shown on it."""

    def __init__(self, text: str = "profiling") -> None:
        super().__init__()
        self.text, self.shown = text, threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.text in self.getvalue():
            self.shown.set()
        return written
