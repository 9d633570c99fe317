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

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # each is imported when it is first used: passes that only plan need no torch
    from fxsplit.passes.augment import Augment
    from fxsplit.passes.baselines import Even, Greedy
    from fxsplit.passes.batch_norm import BatchNorm
    from fxsplit.passes.carry_tensors import CarryTensors
    from fxsplit.passes.constraints import Pin, Together
    from fxsplit.passes.cut import Cut
    from fxsplit.passes.debug import Print, Stop
    from fxsplit.passes.emit import Emit
    from fxsplit.passes.leaf import Leaf
    from fxsplit.passes.order import Order
    from fxsplit.passes.partition import Partition
    from fxsplit.passes.profile.profile import Profile
    from fxsplit.passes.read_plan import ReadPlan, SplitBy, TakePlan
    from fxsplit.passes.schedule import SchedulePlan

    DEFAULT: tuple[Profile | Augment | Order | Partition | Emit | BatchNorm, ...]

_HOME = {
    "leaf": ("leaf", "Leaf"),
    "profile": ("profile.profile", "Profile"),
    "cut": ("cut", "Cut"),
    "augment": ("augment", "Augment"),
    "order": ("order", "Order"),
    "partition": ("partition", "Partition"),
    "schedule": ("schedule", "SchedulePlan"),
    "emit": ("emit", "Emit"),
    "batch-norm": ("batch_norm", "BatchNorm"),
    "carry-tensors": ("carry_tensors", "CarryTensors"),
    "pin": ("constraints", "Pin"),
    "together": ("constraints", "Together"),
    "plan": ("read_plan", "ReadPlan"),
    "split": ("read_plan", "SplitBy"),
    "even": ("baselines", "Even"),
    "greedy": ("baselines", "Greedy"),
    "print": ("debug", "Print"),
    "stop": ("debug", "Stop"),
}
"""Every pass by its name in chains: the file and the class."""


_FILES = {cls: file for file, cls in _HOME.values()} | {"TakePlan": "read_plan"}
"""The file of each class. TakePlan holds the plan of compile(plan=), and has no name in chains."""


class _Passes(Mapping[str, Any]):
    """The classes of the passes by name. A class is imported when it is first asked for."""

    def __getitem__(self, name: str) -> Any:
        file, cls = _HOME[name]
        return getattr(import_module(f"fxsplit.passes.{file}"), cls)

    def __iter__(self) -> Iterator[str]:
        return iter(_HOME)

    def __len__(self) -> int:
        return len(_HOME)


# Text chains use these names; users name their own passes `package.module:attribute`.
PASSES: Mapping[str, Any] = _Passes()
"""Every pass of fxsplit, by its name in chains."""

_DEFAULT = ("profile", "augment", "order", "partition", "emit", "batch-norm")
"""The default chain of compile(), `DEFAULT`."""


def __getattr__(name: str) -> Any:
    """Import a pass by the name of its class, or make the default chain."""
    if name == "DEFAULT":
        value: Any = tuple(PASSES[step]() for step in _DEFAULT)
    else:
        file = _FILES.get(name)
        if file is None:
            raise AttributeError(f"fxsplit.passes has no {name!r}")
        value = getattr(import_module(f"fxsplit.passes.{file}"), name)
    globals()[name] = value
    return value


__all__ = [
    "DEFAULT",
    "PASSES",
    "Augment",
    "BatchNorm",
    "CarryTensors",
    "Cut",
    "Emit",
    "Even",
    "Greedy",
    "Leaf",
    "Order",
    "Partition",
    "Pin",
    "Print",
    "Profile",
    "ReadPlan",
    "SchedulePlan",
    "SplitBy",
    "Stop",
    "TakePlan",
    "Together",
]
