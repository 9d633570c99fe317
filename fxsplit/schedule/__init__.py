"""Schedules as data: the actions of each device, in order.

Pure functions generate schedules. A verifier and a simulator read them, and the runtime executes them.
"""

from fxsplit.schedule.action import Action
from fxsplit.schedule.generators.catalogue import RUNNABLE, SCHEDULES, find_schedule, generate
from fxsplit.schedule.schedule import Schedule
from fxsplit.schedule.simulation.simulate import Simulation, Times, simulate
from fxsplit.schedule.solver.search import SearchResult, search
from fxsplit.schedule.torch_csv import read_csv, write_csv
from fxsplit.schedule.verify import verify

__all__ = [
    "RUNNABLE",
    "SCHEDULES",
    "Action",
    "Schedule",
    "SearchResult",
    "Simulation",
    "Times",
    "find_schedule",
    "generate",
    "read_csv",
    "search",
    "simulate",
    "verify",
    "write_csv",
]
