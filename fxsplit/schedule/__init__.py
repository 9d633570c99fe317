"""Schedules as data: pure functions make them, a checker and a simulator read them, the runtime executes them."""

from fxsplit.schedule.action import Action, Schedule
from fxsplit.schedule.generate import PEAKS, SCHEDULES, find_schedule
from fxsplit.schedule.simulate import Simulation, simulate

__all__ = ["PEAKS", "SCHEDULES", "Action", "Schedule", "Simulation", "find_schedule", "simulate"]
