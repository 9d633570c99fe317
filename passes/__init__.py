"""The passes, a file or folder each; the only list of them.

A pass takes an IR (a graph and the facts known of it) and returns another. compile() runs a chain of them: measure the
nodes (profile), enumerate where the graph can be cut (augment, order), choose the cuts (partition), cut (emit), and put
aside what batch norms write (batch-norm).
"""

# The root of the checkout is on the path wherever the checkout is installed. A pass imported under two names would be
# two classes, and what asks for one of them would not see the other.
if __name__ != "fxsplit.passes":
    raise ImportError("import fxsplit.passes: passes is only the folder that it lies in")

from fxsplit.passes.augment import Augment
from fxsplit.passes.batch_norm import BatchNorm
from fxsplit.passes.carry_tensors import CarryTensors
from fxsplit.passes.cut import Cut
from fxsplit.passes.emit import Emit
from fxsplit.passes.leaf import Leaf
from fxsplit.passes.order import Order
from fxsplit.passes.partition import Partition
from fxsplit.passes.profile.profile import Profile

# The names by which text chains know them; a user names a pass of their own `package.module:attribute`.
PASSES = {p.name: p for p in (Leaf, Profile, Cut, Augment, Order, Partition, Emit, BatchNorm, CarryTensors)}
"""Every pass that comes with fxsplit, by its name in chains."""

DEFAULT = (Profile(), Augment(), Order(), Partition(), Emit(), BatchNorm())
"""The chain that compile() runs unless told otherwise."""

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
