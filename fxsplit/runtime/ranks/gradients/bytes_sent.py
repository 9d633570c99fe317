"""Counts of the bytes of gradients that a rank has sent, and of the bytes of whole gradients."""

from __future__ import annotations


class BytesSent:
    """The bytes of gradients that one rank has sent since the pipeline was compiled.

    steps: how often gradients were added over ranks.
    whole_bytes: the size of the gradients, uncompressed.
    sent_bytes: the bytes that were sent for them (None: unknown, since a user's hook does not say). These are the bytes
        given to a collective operation, however it distributes them.
    """

    def __init__(self, hook: str = "allreduce") -> None:
        self.hook = hook
        self.steps = 0
        self.whole_bytes = 0
        self.sent_bytes: int | None = 0

    @property
    def saved(self) -> float | None:
        """The share of the bytes that compression has saved, from 0 to 1 (None: unknown)."""
        if self.sent_bytes is None:
            return None
        return 1 - self.sent_bytes / self.whole_bytes if self.whole_bytes else 0.0

    def note(self, whole_bytes: int, sent_bytes: int | None) -> None:
        """Add to the counts: gradients of `whole_bytes` were sent as `sent_bytes` (None: unknown)."""
        self.whole_bytes += whole_bytes
        self.sent_bytes = None if None in (sent_bytes, self.sent_bytes) else (self.sent_bytes or 0) + (sent_bytes or 0)

    def __str__(self) -> str:
        where = f"{self.whole_bytes:,} bytes of gradients in {self.steps} steps by {self.hook}"
        if self.saved is None:
            return f"{where}, which does not say how many bytes it sent"
        return f"{where}: {self.sent_bytes:,} bytes sent ({100 * self.saved:.1f} % saved)"
