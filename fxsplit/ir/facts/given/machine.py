"""Machine: the devices that a plan may use, with their memory and speed, and the links between neighbours.

The devices need not be present: `Machine.planned(8)` is a machine to plan for, and no pipeline can run on it.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias, get_args

from fxsplit.errors import InputError, suggest
from fxsplit.ir.graph import IR, GivenFact
from fxsplit.ir.text.records import Record, Row, list_values
from fxsplit.ir.text.values import DeviceName
from fxsplit.system.figures import AMOUNT, TOO_LARGE, format_bytes, format_count, is_amount, show
from fxsplit.system.shown import Parts, Shown, Table

if TYPE_CHECKING:  # torch takes a second to load, and a planned machine has no torch devices
    import torch
    from torch import nn

DeviceLike: TypeAlias = "str | torch.device"
TransferKind: TypeAlias = Literal["asynchronous", "blocking"]
"""Whether devices compute while their messages are under way ("asynchronous"), or wait for them ("blocking")."""
TRANSFER_KINDS: tuple[TransferKind, ...] = get_args(TransferKind)
GPU_LINK_BYTES_PER_S = 16e9
"""Assumed for a link between two GPUs if none is stated: a 16-lane PCIe 3 link, the slowest in common use."""
LEAST_BYTES_PER_S = 1e-3
"""A slower link is refused as a mistake: the resulting times would overflow."""
LEAST_SPEED, MOST_SPEED = 1e-12, 1e12
"""A device that is slower or faster than this, relative to the profiled one, is refused as a mistake."""
MAX_DEVICES = 512
"""More devices are refused: the search keeps a table of states for each."""


@dataclass(frozen=True)
class Device:
    """A device that stages can run on.

    - `name`: unique in the machine.
    - `torch_device`: the device of its stages' tensors, also by name; None in a machine that is only planned for.
      `torch.device("cuda")`, and so "cuda", is the GPU that is current when the Device is made.
    - `memory_bytes`: the limit for weights, activations and all other memory of its stages; unlimited by default.
    - `speed`: relative to the profiled hardware; a device of speed 2 takes half as long.
    - `bytes_per_s`: the bandwidth of its own link, if it is less than that of the links between devices. It slows this
      device's end of a transfer; the other end is busy for as long as its own link and the link between them take.
    - `host`: it takes each node's `host_ms`, and exchanges values without cost, like CPUs of dnn-partitioning files.

    Raises InputError for a value that is not of its type, or not positive, and for a kind of torch device that no stage
    runs on.
    """

    name: str
    torch_device: torch.device | None = None
    memory_bytes: float = inf
    speed: float = 1.0
    bytes_per_s: float = inf
    host: bool = False

    if TYPE_CHECKING:  # a field has one type, but this argument may be a name too, which becomes a device

        def __init__(
            self,
            name: str,
            torch_device: DeviceLike | None = None,
            memory_bytes: float = inf,
            speed: float = 1.0,
            bytes_per_s: float = inf,
            host: bool = False,
        ) -> None: ...

    def __post_init__(self) -> None:
        if self.torch_device is not None and not isinstance(self.torch_device, DeviceName):
            # Planning does not load torch.
            from fxsplit.ir.facts.given.torch_devices import read_device

            object.__setattr__(self, "torch_device", read_device(self.torch_device, f"device {self.name!r}"))
        for what in ("memory_bytes", "speed", "bytes_per_s"):
            value = getattr(self, what)
            if not _is_number(value):
                raise InputError(f"device {self.name!r} has {what}={show(value)}: give a number")
            if TOO_LARGE <= value < inf:
                raise InputError(
                    f"device {self.name!r} has {what}={show(value)}: give a number below {TOO_LARGE:g}, or inf"
                )
        for what in ("memory_bytes", "bytes_per_s"):
            # The comparison is negated, so that NaN is refused too.
            if not getattr(self, what) > 0 or (what == "bytes_per_s" and getattr(self, what) < LEAST_BYTES_PER_S):
                raise InputError(f"device {self.name!r} has {what}={getattr(self, what)}: give a positive number")
        if not LEAST_SPEED <= self.speed <= MOST_SPEED:
            raise InputError(
                f"device {self.name!r} has speed={show(self.speed)}: give a positive number, from {LEAST_SPEED:g} to "
                f"{MOST_SPEED:g} (1.0 = as profiled)"
            )


@dataclass(frozen=True, repr=False)
class Machine(Shown, GivenFact):
    """Devices in pipeline order, and the bandwidth between each device and the next.

    `links[i]` joins devices i and i + 1, in bytes per second. An infinite link hands values over without a copy, as
    between threads of one process on a CPU.
    `latencies_ms[i]` is the time from the end of sending a message over link i to its arrival, in both directions; all
    are 0 by default.
    `transfers` says whether devices compute while their messages are under way, or wait for them.
    An unrolled machine has a device for each stage. `real` are then the real devices, `real_links` and
    `real_latencies_ms` the links between these, and `homes[s]` the numbers of the real devices of stage s.
    Raises InputError unless names are unique and there is a link for each pair of neighbours.
    """

    devices: tuple[Device, ...]
    links: tuple[float, ...]
    homes: tuple[tuple[int, ...], ...] = ()
    real: tuple[Device, ...] = ()
    real_links: tuple[float, ...] = ()
    latencies_ms: tuple[float, ...] = ()
    transfers: TransferKind = "asynchronous"
    real_latencies_ms: tuple[float, ...] = ()

    made_by: ClassVar[str] = "compile(devices=)"

    def __post_init__(self) -> None:
        if not self.devices:
            raise InputError("a machine without devices: give at least one")
        names = [d.name for d in self.devices]
        if len(set(names)) != len(names):
            raise InputError(f"devices are called {names}: give each a name of its own")
        if len(self.links) != len(self.devices) - 1:
            raise InputError(
                f"{len(self.devices)} devices need {len(self.devices) - 1} links between neighbours, "
                f"not {len(self.links)}: give one bandwidth for each pair of neighbours"
            )
        if len(self.real_links) != max(0, len(self.real) - 1):
            raise InputError(f"{len(self.real)} real devices need {max(0, len(self.real) - 1)} real_links between them")
        # Infinite links are allowed: they copy nothing.
        for link in self.links:
            if not _is_number(link):
                raise InputError(f"a link of {show(link)} bytes per second: give a number, or inf for no copy")
            if not link >= LEAST_BYTES_PER_S:
                raise InputError(
                    f"a link of {link} bytes per second: give a positive number, at least {LEAST_BYTES_PER_S:g}, or "
                    "inf for no copy"
                )
            if TOO_LARGE <= link < inf:
                raise InputError(f"a link of {link} bytes per second: give a number below {TOO_LARGE:g}, or inf")
        self._check_messages()

    def _check_messages(self) -> None:
        """Raise InputError for latencies that do not fit the links or are no amounts, or unknown kinds of transfer."""
        for latencies, links in ((self.latencies_ms, self.links), (self.real_latencies_ms, self.real_links)):
            if latencies and len(latencies) != len(links):
                raise InputError(f"{len(latencies)} latencies of {len(links)} links: give one in ms for each link")
            for latency in latencies:
                if not is_amount(latency):
                    raise InputError(f"a latency of {show(latency)} ms: give {AMOUNT}")
        if self.transfers not in TRANSFER_KINDS:
            raise InputError(
                f"transfers={show(self.transfers)}: give {' or '.join(TRANSFER_KINDS)}"
                f"{suggest(self.transfers, TRANSFER_KINDS)}"
            )

    @classmethod
    def of(
        cls,
        devices: int | DeviceLike | Sequence[DeviceLike | Device] | Machine,
        *,
        bytes_per_s: float | None = None,
        memory_bytes: float | None = None,
        model: nn.Module | None = None,
    ) -> Machine:
        """Return the machine that a user means by `devices`.

        `devices` is a number, names or torch.devices with repeats allowed, Device objects, or a Machine, which is
        returned unchanged. A number means GPUs if there are enough. With fewer GPUs it means all of them, repeated
        evenly, if `model` or torch's default device is on a GPU, and CPU devices otherwise; a warning says which.
        `bytes_per_s` states the bandwidth of every link, `memory_bytes` the memory of every device. By default CPU
        devices are unlimited, and devices on one GPU share its free memory evenly (see `torch_devices.read_memory`).
        Raises InputError for a device that is not present.
        """
        import torch

        from fxsplit.ir.facts.given.torch_devices import choose_devices, find_device, read_memory

        if isinstance(devices, Machine):
            _check_here(devices.devices)
            return devices
        # True is a number in Python, and surely not meant as one device.
        if isinstance(devices, bool) or (isinstance(devices, int) and devices < 1):
            raise InputError(f"devices={show(devices)}: give at least 1 device, for example fxsplit.compile(model, 2)")
        if isinstance(devices, int):
            check_device_count(devices)
            devices = choose_devices(devices, model)
        elif isinstance(devices, (str, torch.device, Device)):
            devices = [devices]
        elif not isinstance(devices, (list, tuple)):
            raise InputError(f"devices={devices!r}: give a number, a list of names or torch.devices, or a Machine")
        _check_here([d for d in devices if isinstance(d, Device)])
        parsed = [d if isinstance(d, Device) else find_device(d) for d in devices]
        shared = Counter(d for d in parsed if isinstance(d, torch.device))
        memory = {d: read_memory(d) / count if memory_bytes is None else memory_bytes for d, count in shared.items()}
        made = tuple(
            d if isinstance(d, Device) else Device(_name_device(d, i), d, memory[d]) for i, d in enumerate(parsed)
        )
        pairs = itertools.pairwise(made)
        # Between devices on one GPU, and between CPU devices, nothing is copied.
        links = (inf if a.torch_device == b.torch_device else GPU_LINK_BYTES_PER_S for a, b in pairs)
        return cls(made, tuple(links) if bytes_per_s is None else (bytes_per_s,) * (len(made) - 1))

    @classmethod
    def planned(cls, devices: int, bytes_per_s: float = inf, memory_bytes: float = inf) -> Machine:
        """Return a machine of equal devices and links to plan for, which need not be present."""
        if type(devices) is not int or devices < 1:
            raise InputError(f"devices={show(devices)}: give at least 1 device to plan for")
        check_device_count(devices)
        return cls(
            tuple(Device(f"device{i}", memory_bytes=memory_bytes) for i in range(devices)),
            (bytes_per_s,) * (devices - 1),
        )

    def unrolled(self, homes: Sequence[Sequence[int]]) -> Machine:
        """Return the machine with a device for each stage, where stage s is on devices `homes[s]` of this machine.

        The planner gives each stage a device. For schedules with several stages on a device, or with replicas, it plans
        on the unrolled machine. Stages of one device share its memory evenly, and values between them need no link. A
        stage on several devices has the speed of the slowest and the memory of the smallest.
        """
        if [list(home) for home in homes] == [[i] for i in range(len(self))]:
            return self
        # The number of stages of each device, and how many of them have been unrolled so far.
        count = Counter(device for home in homes for device in home)
        seen: Counter[int] = Counter()
        made = []
        for home in homes:
            device = self.devices[home[0]]
            name = f"{device.name}/{seen[home[0]]}" if count[home[0]] > 1 else device.name
            memory = min(self.devices[d].memory_bytes / count[d] for d in home)
            speed = min(self.devices[d].speed for d in home)
            own = min(self.devices[d].bytes_per_s for d in home)
            made.append(replace(device, name=name, memory_bytes=memory, speed=speed, bytes_per_s=own))
            seen[home[0]] += 1
        links = (
            min(inf if a == b else self._find_link(a, b) for a, b in zip(one, other, strict=False))
            for one, other in itertools.pairwise(homes)
        )
        latencies = tuple(
            max(0.0 if a == b else self._find_latency(a, b) for a, b in zip(one, other, strict=False))
            for one, other in itertools.pairwise(homes)
        )
        return Machine(
            tuple(made),
            tuple(links),
            tuple(tuple(home) for home in homes),
            self.devices,
            self.links,
            latencies if any(latencies) else (),
            self.transfers,
            self.latencies_ms,
        )

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def uniform(self) -> bool:
        """Whether all devices are alike and all links too. It then does not matter which devices stay idle."""
        kinds = {(d.memory_bytes, d.speed, d.bytes_per_s, d.host) for d in self.devices}
        return len(kinds) == 1 and self.equal_links

    @property
    def equal_links(self) -> bool:
        """Whether all links have the same bandwidth and latency."""
        return len(set(self.links)) <= 1 and len(set(self.latencies_ms)) <= 1

    def rolled(self) -> Machine:
        """Return the machine from which an unrolled machine was made: its real devices and their links."""
        if not self.real:
            return self
        return Machine(self.real, self.real_links, latencies_ms=self.real_latencies_ms, transfers=self.transfers)

    def lift_memory_limits(self) -> Machine:
        """Return the same devices and links, with unlimited memory."""
        return replace(self, devices=tuple(replace(d, memory_bytes=inf) for d in self.devices))

    def bytes_per_ms(self, own: int, other: int) -> float:
        """Return the bandwidth from device `own` to device `other`, limited by the own link of `own`, in bytes per ms.

        Devices that are not neighbours count as joined by the slowest link. This happens in plans that take devices in
        another order than the machine's, or leave some out.
        """
        # Two stages of one real device hand values over in its memory.
        together = own != other and bool(self.homes) and self.homes[own] == self.homes[other]
        if self.devices[own].host or together:
            return inf
        return min(self._find_link(own, other), self.devices[own].bytes_per_s) / 1000.0

    def _find_link(self, one: int, other: int) -> float:
        """Return the bandwidth between two devices, without their own links, in bytes per second."""
        if self.devices[one].host:
            return inf
        return self.links[min(one, other)] if abs(one - other) == 1 else min(self.links, default=inf)

    def latency_ms(self, own: int, other: int) -> float:
        """Return how long device `own` takes for a message of no bytes from or to device `other`, in ms.

        Devices that are not neighbours count as joined by the link of the largest latency.
        """
        together = own != other and bool(self.homes) and self.homes[own] == self.homes[other]
        return 0.0 if self.devices[own].host or together else self._find_latency(own, other)

    def _find_latency(self, one: int, other: int) -> float:
        """Return the latency between two devices, in ms."""
        if self.devices[one].host or not self.latencies_ms:
            return 0.0
        return self.latencies_ms[min(one, other)] if abs(one - other) == 1 else max(self.latencies_ms)

    def reduce_ms_per_byte(self, devices: Sequence[int]) -> float:
        """Return how long r neighbouring devices take to sum their gradients, in milliseconds per byte of gradients.

        4 (r - 1) / (r^2 bandwidth), as in PipeDream (Narayanan et al. 2019), over the slowest link among them.
        """
        r = len(devices)
        if r == 1:
            return 0.0
        slowest = min(self.bytes_per_ms(a, b) for a, b in itertools.pairwise(devices))
        # bytes_per_ms counts the own link of its first device, so the pairs above leave out that of the last device.
        slowest = min(slowest, self.bytes_per_ms(devices[-1], devices[-2]))
        return 4.0 * (r - 1) / (r * r * slowest)

    def torch_devices(self) -> list[torch.device]:
        """Return the torch device of each device; raises InputError for a machine that is only planned for."""
        found = [d.torch_device for d in self.devices if d.torch_device is not None]
        if len(found) < len(self.devices):
            missing = next(d.name for d in self.devices if d.torch_device is None)
            raise InputError(f"device {missing!r} is only planned for: give Device(..., torch_device=) to run on it")
        return found

    def intraop_threads(self) -> int:
        """Return how many threads each CPU device may use inside one operator: its share of the cores, at least 1."""
        # Stages that were unrolled from one device take turns on its threads.
        homes = [home[0] for home in self.homes] or range(len(self))
        sharers = len({home for home, d in zip(homes, self.torch_devices(), strict=True) if d.type == "cpu"})
        return max(1, (os.cpu_count() or 1) // max(1, sharers))

    def to_record(self, ir: IR) -> Record:
        """Return the machine in the form in which it is stored in text."""
        values: Row = {"devices": [_to_row(d) for d in self.devices], "links": tuple(self.links)}
        values |= {"homes": self.homes} if self.homes else {}
        if self.real:
            values |= {"real": [_to_row(d) for d in self.real], "real_links": tuple(self.real_links)}
        values |= list_values(self, leave_out=("devices", "links", "homes", "real", "real_links"))
        return Record("Machine", values)

    @classmethod
    def from_record(cls, record: Record, ir: IR) -> Machine:
        """Return the machine of a record; raises IRSyntaxError. Without torch, devices keep only their names."""
        made: Row = {name: tuple(_from_row(record, row, name) for row in record.take_rows(name)) for name in _TABLES}
        return record.make(cls, made)

    def summarise(self) -> str:
        """Return the number of devices, and their names."""
        names = [d.name for d in self.devices]
        return f"{format_count(len(names), 'device')}: {', '.join(names[:8])}{', ...' if names[8:] else ''}"

    def show(self) -> Parts:
        """Return a table of the devices and the links between them."""
        rows = []
        late = self.latencies_ms or (0.0,) * len(self.links)
        links = [
            _format_rate(rate) + f", {ms * 1e3:g} us" * (ms > 0) for rate, ms in zip(self.links, late, strict=True)
        ]
        for device, link in zip(self.devices, [*links, ""], strict=True):
            memory = "unlimited" if device.memory_bytes == inf else format_bytes(device.memory_bytes)
            place = device.torch_device or ("a host" if device.host else "planned for")
            own = _format_rate(device.bytes_per_s)
            rows.append((device.name, place, memory, f"{device.speed:g}", own, link))
        yield Table(("device", "is", ">memory", ">speed", ">own link", ">link to next"), rows)
        if self.transfers == "blocking":
            yield "blocking transfers: devices wait for their messages"


_TABLES = ("devices", "real")


def _to_row(device: Device) -> Row:
    """Return a device as a row of a table."""
    place = {} if device.torch_device is None else {"torch_device": str(device.torch_device)}
    return list_values(device) | place


def _from_row(record: Record, row: Row, table: str) -> Device:
    """Return the device of a row."""
    place = row.get("torch_device")
    if place is not None and not isinstance(place, str):
        record.fail("torch_device must be a name, such as cuda:0", table)
    known = place is None or record.source.torch
    return record.make_row(Device, row | {"torch_device": place if known else DeviceName(str(place))}, table)


def _is_number(value: object) -> bool:
    """Return whether a value is a number. A bool is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _format_rate(bytes_per_s: float) -> str:
    """Return a bandwidth as a text for tables."""
    return "unlimited" if bytes_per_s == inf else f"{bytes_per_s:.6g} B/s"


def check_device_count(count: int) -> None:
    """Raise InputError for more than MAX_DEVICES devices, before a list of them is made."""
    if count > MAX_DEVICES:
        raise InputError(f"{show(count)} devices: give at most {MAX_DEVICES}, as many as one search can plan for")


def _check_here(devices: Sequence[Device]) -> None:
    """Raise InputError for a device that is not present, unless it is only planned for."""
    from fxsplit.ir.facts.given.torch_devices import check_here

    for device in devices:
        if device.torch_device is not None:
            check_here(device.torch_device, f"device {device.name!r} ({device.torch_device})")


def _name_device(device: torch.device, position: int) -> str:
    """Return a unique name for a device that may be listed several times: `cpu:1`, or `cuda:0#1` at position 1."""
    return f"{device.type}:{position}" if device.type == "cpu" else f"{device}#{position}"
