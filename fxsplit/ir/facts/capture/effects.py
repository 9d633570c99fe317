"""Effects: what running a graph changes besides computing its outputs: memory, random generators and gradients.

`Effects` describes one graph, node by node. It is forgotten if a pass rewrites the graph, and the new graph is then
observed again. `CallEffects` describes the model as a whole, whichever graph computes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from fxsplit.errors import BrokenFact
from fxsplit.ir.facts.capture.example import Example
from fxsplit.ir.facts.capture.output_kinds import OutputKind
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.graph import IR, Fact, GivenFact
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.fx.dependences import find_inseparable, find_ordered_pairs
from fxsplit.torch_internals.fx.observe import Observation, Visit, observe
from fxsplit.torch_internals.scopes.modes import is_autocast_on
from fxsplit.torch_internals.tensors.accelerators import is_present


@dataclass(frozen=True, eq=False)
class Effects(Fact):
    """What each node writes, which memory it shares, and what it draws, with the consequences for order and cuts.

    - `nodes`: the observation of each node, by name
    - `together`: sets of nodes that no cut may separate, such as a node that writes in place and the owner of the
      memory
    - `ordered`: pairs of nodes that keep their order although no value flows between them
    """

    nodes: Mapping[str, Observation]
    together: tuple[tuple[str, ...], ...]
    ordered: tuple[tuple[str, str], ...]

    made_by: ClassVar[str] = "profile"

    @cached_property
    def drawing(self) -> frozenset[str]:
        """The nodes that draw random numbers, at least in training mode."""
        return frozenset(name for name, node in self.nodes.items() if node.draws)

    @cached_property
    def drew(self) -> frozenset[str]:
        """The nodes that drew random numbers in the mode of their modules."""
        return frozenset(name for name, node in self.nodes.items() if node.drew)

    def verify(self, ir: IR) -> None:
        """Raise BrokenFact unless the observed nodes are those of the graph, in the same order."""
        # A pass may keep Effects over a rewrite that only changes the targets of nodes. It may not add or move nodes.
        graph = [n.name for n in ir.gm.graph.nodes]
        if graph != list(self.nodes):
            odd = sorted(set(graph) ^ set(self.nodes)) or graph
            raise BrokenFact(f"the effects describe other nodes than the graph (first difference: {odd[0]!r})")
        # The planner sees only the costs, and a pass may have made them without the constraints of the graph.
        costs = ir.get(Costs)
        if costs is None:
            return
        ordered = frozenset(costs.ordered)
        lost = [*_list_parted(self.together, costs.together), *(p for p in self.ordered if p not in ordered)]
        if lost:
            raise BrokenFact(f"nodes {', '.join(lost[0])} must stay together or in order, and the costs do not say so")

    def __str__(self) -> str:
        """Return a line for each node that writes, draws, or lies in another node's memory; then the constraints."""
        lines = []
        for name, node in self.nodes.items():
            # A value in memory of its own is the common case, and would fill the dump.
            shared = [owner for owner in node.owners if owner != name]
            words = [f"writes {' '.join(node.mutates)}"] * bool(node.mutates) + ["draws"] * node.draws
            words += [f"lies in {' '.join(shared)}"] * bool(shared)
            lines += [f"{name}: {', '.join(words)}"] * bool(words)
        lines += ["together: " + " ".join(names) for names in self.together]
        return "\n".join([*lines, *(f"ordered: {a} before {b}" for a, b in self.ordered)])


def _list_parted(sets: Sequence[tuple[str, ...]], kept: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the sets in `sets` that no set in `kept` contains: their nodes may have been parted.

    A graph that writes rows in place has about one set per node, so a set is compared only with sets that share a name.
    """
    same, parted = frozenset(kept), []
    holders: dict[str, set[int]] = defaultdict(set)
    for number, names in enumerate(kept):
        for name in names:
            holders[name].add(number)
    for names in sets:
        # The empty set lies in any set, if there is one.
        if names in same or (kept and not names):
            continue
        # Begin with the name that the fewest sets have, so that few sets have to be compared.
        found = sorted((holders.get(name, set()) for name in names), key=len)
        if not found or not set.intersection(*found):
            parted.append(names)
    return parted


SIZES = ("text", "output_bytes", "gradient_bytes", "kept_bytes", "kept_for", "kept_for_bytes", "unkept_bytes")
"""The fields of an observation that depend on the dtypes that a device computes in."""


def find_effects(ir: IR) -> Effects:
    """Return the effects of the graph of `ir`.

    If they are not known yet, run the graph on its Example to observe them.
    """
    return ir.get(Effects) or observe_effects(ir)


def observe_effects(ir: IR, visit: Visit | None = None, *, parameters_together: bool = False) -> Effects:
    """Run the graph of `ir` once on its Example, and return the effects of its nodes.

    - `visit` is called before each call node, with the node, its callable, arguments and keyword arguments
    - `parameters_together` asks that all users of one parameter are in one stage

    If autocast is on for the devices of the stages, and the model is on another kind of device, sizes are for a device
    of a stage. Raises MissingFact without an Example, and TraceError for a graph that trains a tensor that is not a
    parameter.
    """
    example = ir[Example]
    there = _observe_cast(ir, visit)
    # Writes and draws are observed on the device of the model.
    nodes = observe(ir.gm, example.tensors, None if there else visit, from_shapes=example.from_shapes)
    for name, seen in there.items():
        sizes = {field: getattr(seen, field) for field in SIZES}
        nodes[name] = replace(nodes[name], **sizes)
    together = find_inseparable(ir.gm, nodes, parameters_together=parameters_together)
    return Effects(nodes, tuple(together), tuple(find_ordered_pairs(ir.gm, nodes)))


def _observe_cast(ir: IR, visit: Visit | None) -> dict[str, Observation]:
    """Return the observations on a stage's device under autocast; empty unless only that device has autocast.

    The device of the model may differ from the device of the stage. With autocast on the model's device too, or on
    neither, nothing has to be observed again.
    """
    example, machine = ir[Example], ir.get(Machine)
    device = machine.devices[0].torch_device if machine else None
    here = example.tensors[0].device.type
    # Autograd asks for streams of the device even for fake tensors, and aborts Python if the device is not present.
    if device is None or device.type == here or not (is_autocast_on([device.type]) and is_present(device)):
        return {}
    # An operator may need values. The sizes are then those without autocast.
    with suppress(Exception):
        return observe(ir.gm, example.tensors, visit, from_shapes=True, device=device)
    return {}


@dataclass(frozen=True, eq=False)
class CallEffects(GivenFact):
    """The side effects of one call of the model. The check of the capture finds them; they do not depend on the graph.

    - `writes_inputs`: a call writes to its inputs in place
    - `written_buffers`: the buffers that every call writes, by path, without those of batch norms: the batch-norm pass
      keeps these in order
    - `saved_buffers`: paths of the buffers that every call writes and that an operator may have saved for its backward
    - `sets_hooks`: modules put gradient hooks on activations
    - `containers`: the model's own containers (an OrderedDict, for example), if the graph returns plain ones
    - `meanings`: for each output tensor, how the batch's output follows from those of its microbatches
    """

    writes_inputs: bool = False
    written_buffers: Mapping[str, Tensor] = field(default_factory=dict)
    saved_buffers: tuple[str, ...] = ()
    sets_hooks: bool = False
    containers: pytree.TreeSpec | None = None
    meanings: tuple[OutputKind, ...] = ()

    made_by: ClassVar[str] = "trace"

    def __str__(self) -> str:
        """Return a line for each field that is not empty, and one for the outputs."""
        lines = ["writes its inputs"] * self.writes_inputs + ["sets hooks"] * self.sets_hooks
        lines += [f"writes buffer {path}" for path in self.written_buffers]
        lines += [f"saves buffer {path}" for path in self.saved_buffers]
        return "\n".join([*lines, f"outputs: {', '.join(map(str, self.meanings)) or 'none'}"])
