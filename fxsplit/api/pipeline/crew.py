"""Crew: who runs the stages of a pipeline."""

from __future__ import annotations

from fxsplit.api.compiler.team import Team
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.runtime.backends.crew import Crew
from fxsplit.runtime.backends.threads import Workers
from fxsplit.runtime.ranks.crew import RankCrew


def make_crew(machine: Machine, team: Team | None) -> Crew:
    """Return threads for all devices of a machine, or this process beside the other ranks of a team."""
    if team is not None:
        return RankCrew(team.world, team.label, team.holdings, team.summing)
    return Workers(machine.torch_devices(), machine.intraop_threads(), [d.name for d in machine.devices])
