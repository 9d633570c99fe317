"""Warn of releases of torch and companion libraries (accelerate, transformers, ...) that fxsplit was not tried with."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from fxsplit.system.user_lines import warn_user

TRIED = {
    "accelerate": ((1, 10), (1, 15)),
    "lightning": ((2, 5), (2, 6)),
    "peft": ((0, 18), (0, 21)),
    "torch": ((2, 11), (2, 15)),
    "transformers": ((5, 18), (5, 24)),
}
"""The first and the last release of each library that was tried; pyproject.toml states the same releases."""

_warned: set[tuple[str, str]] = set()


def warn_of_untried() -> None:
    """Warn, once in a process, of torch and each companion library that is loaded in a release that was not tried."""
    for name, (first, last) in TRIED.items():
        found = read_version(name)
        if found is None or (name, found) in _warned:
            continue
        if not first <= read_release(found) <= last:
            _warned.add((name, found))
            tried = " to ".join(dict.fromkeys(".".join(map(str, each)) for each in (first, last)))
            warn_user(
                f"{name} {found} was not tried with this fxsplit, {name} {tried} was: compare the pipeline with the "
                f"model, fxsplit.verify(pipe, x), or install a release that was tried"
            )


def read_version(name: str) -> str | None:
    """Return the version of a library; None if it is not loaded or does not say its version."""
    library = sys.modules.get(name)
    if library is None:
        return None
    own = getattr(library, "__version__", None)
    if isinstance(own, str):
        return own
    # The user's own module may have the library's name, and it was never installed.
    with suppress(PackageNotFoundError):
        return version(name)
    return None


def read_release(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, such as (5, 24) for `5.24.0.dev0`."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
