"""Turn the argument `devices` of compile() into a machine, and perhaps into ranks of torch.distributed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn

from fxsplit.api.compiler.compile_group import make_machine
from fxsplit.errors import InputError
from fxsplit.ir.facts.given.machine import Device, DeviceLike, Machine
from fxsplit.runtime.ranks.world.join import is_launched, join_world
from fxsplit.runtime.ranks.world.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Devices: TypeAlias = "int | DeviceLike | Sequence[DeviceLike | Device] | Machine | DeviceMesh"
"""The types that compile() takes as devices."""


def read_devices(devices: Devices, model: nn.Module) -> tuple[Machine, World | None]:
    """Return the machine that a user means, and the ranks that run it, or None if this process runs all devices.

    Raises InputError if `devices` names no devices.
    """
    if isinstance(devices, str) and devices == "world":
        if is_launched():
            return _make(join_world())
        found = torch.cuda.device_count()
        return Machine.of(found or ["cpu"] * 2, model=model), None
    meshes = sys.modules.get("torch.distributed.device_mesh")
    if meshes is not None and isinstance(devices, meshes.DeviceMesh):
        if devices.ndim > 2:
            raise InputError(f"the mesh has {devices.ndim} dimensions: give two of them, as mesh['dp', 'pp'], or one")
        rows = devices.mesh.tolist() if devices.ndim == 2 else [devices.mesh.tolist()]
        return _make(join_world(rows))
    return Machine.of(devices, model=model), None  # type: ignore[arg-type]


def _make(world: World) -> tuple[Machine, World | None]:
    """Return the machine of a world. A single rank is a device like any other."""
    if len(world) == 1 and len(world.rows) == 1:
        return Machine.of([world.device]), None
    return make_machine(world), world
