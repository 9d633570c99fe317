"""The passes, one file or folder each, and the list of all passes.

A pass takes an IR (a graph and the facts known about it) and returns another IR. compile() runs a chain of passes:

    profile -> augment -> order -> partition -> emit -> batch-norm
    measure    enumerate  sum up   choose       cut     defer running statistics
    nodes      ideals     states   the cuts
"""

# The root of the checkout may be on sys.path, as `passes`. A pass imported under two names would be two classes, and a
# lookup by one class would miss the other.
if __name__ != "fxsplit.passes":
    raise ImportError("import fxsplit.passes: the name passes is only that of its folder")

from fxsplit.passes.augment import Augment
from fxsplit.passes.batch_norm import BatchNorm
from fxsplit.passes.carry_tensors import CarryTensors
from fxsplit.passes.cut import Cut
from fxsplit.passes.emit import Emit
from fxsplit.passes.leaf import Leaf
from fxsplit.passes.order import Order
from fxsplit.passes.partition import Partition
from fxsplit.passes.profile.profile import Profile

# Text chains use these names; users name their own passes `package.module:attribute`.
PASSES = {p.name: p for p in (Leaf, Profile, Cut, Augment, Order, Partition, Emit, BatchNorm, CarryTensors)}
"""Every pass of fxsplit, by its name in chains."""

DEFAULT = (Profile(), Augment(), Order(), Partition(), Emit(), BatchNorm())
"""The default chain of compile()."""

__all__ = [
    "DEFAULT",
    "PASSES",
    "Augment",
    "BatchNorm",
    "CarryTensors",
    "Cut",
    "Emit",
    "Leaf",
    "Order",
    "Partition",
    "Profile",
]
