"""Sum the gradients of a stage's replicas on the first replica's device. A second full set never has to fit there.

Large gradients arrive one after the other. After a gradient is added, it is freed on both devices.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fxsplit.runtime.stage.streams import DeviceStream
from fxsplit.torch_internals.autograd.sums import LEAST_BYTES, Sums
from fxsplit.torch_internals.tensors.sparse_layouts import count_bytes


def add_replica(sums: Sums, part: Sums, leaf_of: Mapping[Tensor, Tensor], stream: DeviceStream) -> None:
    """Add the sums of gradients of another replica (`part`) to the first replica's `sums`, and empty `part`.

    leaf_of: the first replica's leaf for each leaf of the other replica. Leaves of a loss are the same for both.
    stream: the first replica's stream, which already waits for the other replica's stream.
    """
    while part.totals:
        leaves, totals, held_bytes = [], [], 0
        # Small gradients arrive together, since each addition is a call.
        for leaf, total in part.totals.items():
            leaves.append(leaf)
            totals.append(total)
            held_bytes += count_bytes(total)
            if held_bytes >= LEAST_BYTES:
                break
        del total
        for leaf in leaves:
            del part.totals[leaf]
        own = [leaf_of.get(leaf, leaf) for leaf in leaves]
        here = stream.receive(totals)
        # A parameter of the loss may live on another device than the stage.
        sums.add([(leaf, t.to(leaf.device, non_blocking=True), True) for leaf, t in zip(own, here, strict=True)])
        del totals, here
