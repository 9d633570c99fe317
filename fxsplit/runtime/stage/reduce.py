"""Sum the gradients of a stage's replicas on the device of the first one, which never holds two sets of them.

Large gradients come to the device one after the other, and each is let go of, here and where it was, when it is added.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fxsplit.runtime.stage.streams import DeviceStream
from fxsplit.torch_internals.autograd.eager_accumulator import LEAST_BYTES
from fxsplit.torch_internals.autograd.sums import Sums
from fxsplit.torch_internals.tensors.layouts import count_bytes


def add_replica(sums: Sums, part: Sums, leaf_of: Mapping[Tensor, Tensor], stream: DeviceStream) -> None:
    """Add `part`, the sums of another replica, to those of the first one; `part` is empty afterwards.

    leaf_of: the first replica's leaf for each of the other's; leaves of a loss are the same for both.
    stream: the first replica's, which waits already for the other's.
    """
    while part.totals:
        leaves, totals, held_bytes = [], [], 0
        # Small gradients come together, as each addition is a call.
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
        # A parameter of the loss may live elsewhere than the stage.
        sums.add([(leaf, t.to(leaf.device, non_blocking=True), True) for leaf, t in zip(own, here, strict=True)])
        del totals, here
