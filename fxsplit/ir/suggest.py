"""Suggest what was probably meant by a misspelt name, in every place where names are typed."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def suggest(name: object, known: Iterable[str]) -> str:
    """Return `; did you mean '1F1B'?`, to stand behind an error, or nothing if no known name is near."""
    # Without case, as most mistakes are '1f1b' for '1F1B'.
    folded = {other.lower(): other for other in known}
    close = get_close_matches(str(name).lower(), folded, n=1)
    return f"; did you mean {folded[close[0]]!r}?" if close else ""
