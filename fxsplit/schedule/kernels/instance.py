"""Instance: a search's input as arrays. Kernels read it, so every array has one type and is contiguous.

The stages of a device are its *chunks* 0, 1, and so on. The order of a device is a row of *kinds*: kind 2 c is a
forward (F) of chunk c, and kind 2 c + 1 an input gradient (I) of chunk c. Microbatches keep their order in each kind,
so the i-th entry of a kind belongs to microbatch i. All microbatches take equal times, so no other order is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fxsplit.schedule.schedule import Homes
from fxsplit.schedule.simulation.simulate import Times

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
UNLIMITED = 1e9
"""The memory of a device without a limit, in microbatches: more than any schedule has."""


class Instance(NamedTuple):
    """Stages on devices, with times in ms. Arrays have one entry for each stage unless stated.

    - `n_microbatches`
    - `stages`: [devices, chunks], the stages of each device, and `device`: the device of each stage
    - `forward`, `input` and `weight`: the times of F, I and W (the weight gradient) of a microbatch
    - `forward_hop`, `backward_hop`: how long a message over the boundary before the stage keeps its link busy;
      `latency`: how long after that it arrives. They are 0 if both stages of the boundary are on one device
    - `forward_link`, `backward_link`: the number of the link over that boundary, or -1 if both are on one device
    - `n_links`
    - `held`: the memory that an F takes. The unit is one microbatch's activations in all stages of the device
    - `late`: the part of `held` that only the W frees; the I frees the rest
    - `memory`: [devices], the most that a device may hold, in the same unit
    """

    n_microbatches: int
    stages: Ints
    device: Ints
    forward: Floats
    input: Floats
    weight: Floats
    forward_hop: Floats
    backward_hop: Floats
    latency: Floats
    forward_link: Ints
    backward_link: Ints
    n_links: int
    held: Floats
    late: Floats
    memory: Floats

    @property
    def n_devices(self) -> int:
        """The number of devices."""
        return len(self.stages)

    @property
    def n_actions(self) -> int:
        """The number of forwards, input gradients and weight gradients."""
        return 3 * self.device.size * self.n_microbatches

    @property
    def work(self) -> Floats:
        """[devices], how long each device computes in a step, in ms."""
        each: Floats = (self.forward + self.input + self.weight)[self.stages].sum(axis=1)
        return self.n_microbatches * each


def make_instance(
    homes: Homes,
    n_microbatches: int,
    times: Times,
    memory: float | Sequence[float] | None = None,
    kept_for_weights: float | Sequence[float] = 1.0,
    held: Sequence[float] | None = None,
) -> Instance:
    """Return the instance for stages without replicas; the arguments are those of `search`."""
    count, n_devices = len(homes), 1 + max(home[0] for home in homes)
    device = np.array([home[0] for home in homes])
    stages = np.array([np.flatnonzero(device == d) for d in range(n_devices)])
    weight = np.array(times.weight_ms if len(times.weight_ms) else [b / 2 for b in times.backward_ms], float)
    crosses = np.append(False, device[1:] != device[:-1])
    shares = np.full(count, 1 / stages.shape[1]) if held is None else np.array(held, float)
    given: Any = UNLIMITED if memory is None else memory
    limits = np.array([min(m, UNLIMITED) for m in ([given] * n_devices if np.ndim(given) == 0 else given)], float)
    links: dict[tuple[int, int], int] = {}

    def number(source: int, destination: int) -> int:
        return links.setdefault((int(device[source]), int(device[destination])), len(links)) if source >= 0 else -1

    forward_link = [number(s - 1, s) if crosses[s] else -1 for s in range(count)]
    backward_link = [number(s, s - 1) if crosses[s] else -1 for s in range(count)]

    def over_boundary(found: Sequence[float]) -> Floats:
        return np.where(crosses, np.array(found, float) if len(found) else 0.0, 0.0)

    return Instance(
        n_microbatches,
        np.ascontiguousarray(stages, np.int64),
        device.astype(np.int64),
        np.array(times.forward_ms, float),
        np.array(times.backward_ms, float) - weight,
        weight,
        over_boundary(times.forward_hop_ms),
        over_boundary(times.backward_hop_ms),
        over_boundary(times.latency_ms),
        np.array(forward_link, np.int64),
        np.array(backward_link, np.int64),
        max(1, len(links)),
        shares,
        shares * np.broadcast_to(np.array(kept_for_weights, float), count),
        limits,
    )
