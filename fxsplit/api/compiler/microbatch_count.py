"""Choose the number of microbatches of a batch, for compile(), every call, profile(), plan() and "auto".

The number is the user's, or else a search has found it, or else it follows from the batch. This file needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fxsplit.errors import InputError
from fxsplit.system.figures import show

if TYPE_CHECKING:
    from fxsplit.schedule.generators.catalogue import Scheduler

AUTO = "auto"
"""The word for a schedule, or a number of microbatches, that fxsplit chooses."""
PER_DEVICE = 2
"""Microbatches for each device if the user states no number. More fill the pipeline better."""
ROWS_EACH = 4
"""The fewest rows of a microbatch, if each device has one. Smaller ones waste work and make batch norm noisy."""
MOST_MICROBATCHES = 1_000_000
"""More are refused as a mistake: no schedule could list them."""
MOST_PER_DEVICE = 8
"""Microbatches for each device at which a search ends: the share of idle time is small by then."""


def choose_microbatch_count(
    n_devices: int,
    *,
    rows: int | None = None,
    stated: int | None = None,
    found: int | None = None,
    scheduler: Scheduler | None = None,
) -> int:
    """Return the number of microbatches to cut a batch into.

    n_devices: the devices that take part.
    rows: rows of the batch (None: no batch is known yet, as in planning from a profile).
    stated: the user's number, which is taken as it is.
    found: the number that a search chose for another batch, which is taken if this batch has enough rows.
    scheduler: rounds any other number to one that the schedule is made for.

    For example 2 devices and 32 rows give 4 microbatches; 2 devices and 8 rows give 2, of 4 rows each.
    """
    if stated is not None:
        return stated
    # A search for a batch of 32 rows may have found 16 microbatches, too many for a last batch of 5 rows.
    if found is not None and rows is not None and found <= rows:
        return found
    # Enough to fill the pipeline, unless they would have too few rows; but at least one for each device.
    count = PER_DEVICE * n_devices
    if rows is not None:
        count = min(rows, count, max(n_devices, rows // ROWS_EACH))
    return count if scheduler is None else scheduler.nearest(count)


def list_microbatch_counts(rows: int, n_devices: int) -> list[int]:
    """Return the numbers of microbatches that a search tries: one for each device, then twice as many, and so on.

    For a batch with fewer rows than devices, it tries one row for each microbatch.
    """
    tried = [n_devices << i for i in range(MOST_PER_DEVICE.bit_length())]
    return [count for count in tried if count <= min(rows, MOST_PER_DEVICE * n_devices)] or [rows]


def check_microbatch_count(count: Any, otherwise: str = "") -> None:
    """Raise InputError unless `count` is a whole number of at least 1; `otherwise` names what else may be given."""
    # A bool is an int in Python, but a user who gives True means no number.
    if type(count) is not int or count < 1:
        raise InputError(f"n_microbatches={show(count)}: give a number of at least 1{otherwise}")
    if count > MOST_MICROBATCHES:
        raise InputError(f"n_microbatches={show(count)}: give at most {MOST_MICROBATCHES}")
