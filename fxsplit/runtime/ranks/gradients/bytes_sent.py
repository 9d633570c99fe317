"""BytesSent: how many bytes of gradients a rank has sent to add them up, beside those of whole gradients."""

from __future__ import annotations


class BytesSent:
    """The bytes of gradients that one rank has given to others, since the pipeline was compiled.

    steps: how often gradients were added up. whole_bytes: what whole gradients have. sent_bytes: what was sent in their
    place; None where a hook of the user's does not say it. What a collective is given counts, however it spreads that.
    """

    def __init__(self, hook: str = "allreduce") -> None:
        self.hook = hook
        self.steps = 0
        self.whole_bytes = 0
        self.sent_bytes: int | None = 0

    @property
    def saved(self) -> float | None:
        """The share of the bytes that were not sent, from 0 to 1; None where nobody knows how many were."""
        if self.sent_bytes is None:
            return None
        return 1 - self.sent_bytes / self.whole_bytes if self.whole_bytes else 0.0

    def note(self, whole_bytes: int, sent_bytes: int | None) -> None:
        """Count what was sent in place of so many bytes."""
        self.whole_bytes += whole_bytes
        self.sent_bytes = None if None in (sent_bytes, self.sent_bytes) else (self.sent_bytes or 0) + (sent_bytes or 0)

    def __str__(self) -> str:
        where = f"{self.whole_bytes:,} bytes of gradients in {self.steps} steps by {self.hook}"
        if self.saved is None:
            return f"{where}, which does not say how many bytes it sent"
        return f"{where}: {self.sent_bytes:,} bytes sent ({100 * self.saved:.1f} % saved)"
