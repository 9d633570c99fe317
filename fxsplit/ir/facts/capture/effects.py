"""Effects: what running a graph does besides computing its outputs: to memory, to random generators, to gradients.

`Effects` is of one graph, node by node. A pass that rewrites the graph makes it forgotten, and who needs it observes
the new graph. `CallEffects` is of the model as a whole, and the same whichever graph computes it.
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
    """What each node writes, shares memory with, and draws; and what follows from that for order and cuts.

    nodes: what each node did when the graph was observed, by its name.
    together: sets of nodes that no cut may part, such as a node that writes in place and the owner of that memory.
    ordered: pairs of nodes that keep their order though no value flows between them.
    """

    nodes: Mapping[str, Observation]
    together: tuple[tuple[str, ...], ...]
    ordered: tuple[tuple[str, str], ...]

    made_by: ClassVar[str] = "profile"

    @cached_property
    def drawing(self) -> frozenset[str]:
        """The nodes that take random numbers, in training mode at least."""
        return frozenset(name for name, node in self.nodes.items() if node.draws)

    @cached_property
    def drew(self) -> frozenset[str]:
        """The nodes that took random numbers in the mode that their modules were in."""
        return frozenset(name for name, node in self.nodes.items() if node.drew)

    def verify(self, ir: IR) -> None:
        """Raise BrokenFact unless the nodes that were observed are those of the graph, in the same order."""
        # A pass may keep Effects over a rewrite that only changes what nodes call. It may not add or move nodes.
        graph = [n.name for n in ir.gm.graph.nodes]
        if graph != list(self.nodes):
            odd = sorted(set(graph) ^ set(self.nodes)) or graph
            raise BrokenFact(f"the effects are of other nodes than the graph (first difference: {odd[0]!r})")
        # The planner knows the costs alone, which a pass may have made without what the graph demands.
        costs = ir.get(Costs)
        if costs is None:
            return
        ordered = frozenset(costs.ordered)
        lost = [*_list_parted(self.together, costs.together), *(p for p in self.ordered if p not in ordered)]
        if lost:
            raise BrokenFact(f"nodes {', '.join(lost[0])} must stay together or in order, and the costs do not say so")

    def __str__(self) -> str:
        """One line for each node that writes, draws, or lies in another node's memory; then what follows."""
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
    """Return the sets that lie in no set of `kept`.

    A graph that writes rows in place has as many sets as nodes, so a set is compared only with sets that share a name.
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
        # The rarest name comes first, so that few sets are left from the start.
        found = sorted((holders.get(name, set()) for name in names), key=len)
        if not found or not set.intersection(*found):
            parted.append(names)
    return parted


SIZES = ("text", "output_bytes", "gradient_bytes", "kept_bytes", "kept_for", "kept_for_bytes", "unkept_bytes")
"""What of an observation depends on the dtypes that a device computes in."""


def find_effects(ir: IR) -> Effects:
    """Return the effects of the graph of `ir`: those known, or what observing it on its Example finds now."""
    return ir.get(Effects) or observe_effects(ir)


def observe_effects(ir: IR, visit: Visit | None = None, *, parameters_together: bool = False) -> Effects:
    """Run the graph of `ir` once, on its Example, and return what its nodes do besides computing.

    visit: called before each call node runs, with the node, its callable, arguments and keyword arguments.
    parameters_together: whether all users of one parameter must be in one stage.

    Where autocast is on for the stages' kind of device, and the model is elsewhere, sizes are those on such a device.
    Raises MissingFact without an Example, and TraceError for a graph that trains what is no parameter.
    """
    example = ir[Example]
    there = _observe_cast(ir, visit)
    # What a node writes and draws is seen where it runs.
    nodes = observe(ir.gm, example.tensors, None if there else visit, from_shapes=example.from_shapes)
    for name, seen in there.items():
        sizes = {field: getattr(seen, field) for field in SIZES}
        nodes[name] = replace(nodes[name], **sizes)
    together = find_inseparable(ir.gm, nodes, parameters_together=parameters_together)
    return Effects(nodes, tuple(together), tuple(find_ordered_pairs(ir.gm, nodes)))


def _observe_cast(ir: IR, visit: Visit | None) -> dict[str, Observation]:
    """Return what the nodes make on the stages' device if autocast is on there and not where the model is, or nothing.

    Nothing is computed there, and no memory is taken.
    """
    example, machine = ir[Example], ir.get(Machine)
    device = machine.devices[0].torch_device if machine else None
    here = example.tensors[0].device.type
    # Autograd asks for streams of the device also where tensors are imagined, and aborts Python where it has none.
    if device is None or device.type == here or not (is_autocast_on([device.type]) and is_present(device)):
        return {}
    # An operator may need values. Sizes are those without autocast then.
    with suppress(Exception):
        return observe(ir.gm, example.tensors, visit, from_shapes=True, device=device)
    return {}


@dataclass(frozen=True, eq=False)
class CallEffects(GivenFact):
    """What one call of the model leaves behind, whichever graph computes it; found by the check of the capture.

    writes_inputs: whether a call writes to its inputs in place.
    written_buffers: the buffers that every call writes, by path. Batch norms' are not among them: the batch-norm pass
        keeps those in order.
    saved_buffers: paths of the buffers that every call writes and that an operator may have saved for its backward.
    sets_hooks: whether modules put gradient hooks on activations.
    containers: the model's own containers (an OrderedDict, for example), where the graph returns plain ones.
    meanings: for each output tensor, what that of the batch is in terms of those of its microbatches.
    """

    writes_inputs: bool = False
    written_buffers: Mapping[str, Tensor] = field(default_factory=dict)
    saved_buffers: tuple[str, ...] = ()
    sets_hooks: bool = False
    containers: pytree.TreeSpec | None = None
    meanings: tuple[OutputKind, ...] = ()

    made_by: ClassVar[str] = "trace"

    def __str__(self) -> str:
        """One line for each field that says more than "nothing"."""
        # Most models do none of this, and the section then has the last line alone.
        lines = ["writes its inputs"] * self.writes_inputs + ["sets hooks"] * self.sets_hooks
        lines += [f"writes buffer {path}" for path in self.written_buffers]
        lines += [f"saves buffer {path}" for path in self.saved_buffers]
        return "\n".join([*lines, f"outputs: {', '.join(map(str, self.meanings)) or 'none'}"])
