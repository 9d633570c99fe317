"""Costs: what each node takes, makes and keeps, and the graph that the nodes form.

The pass `profile` measures them. They are saved as JSON, and are all that planning needs: no model and no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fxsplit.errors import BrokenFact, ProfileError
from fxsplit.ir.facts.costs.check import check_costs
from fxsplit.ir.facts.costs.compress import count_sent_bytes
from fxsplit.ir.facts.costs.loss import LossCost
from fxsplit.ir.facts.costs.text import list_parts
from fxsplit.ir.graph import IR, Fact
from fxsplit.system.figures import as_list, is_count, show
from fxsplit.system.files import explain_unreadable, write_whole
from fxsplit.system.shown import Parts, Shown, render

if TYPE_CHECKING:  # planning from a profile needs no torch
    from torch import fx

FORMAT = "fxsplit-profile"
VERSION = 4
EARLIER = (3, 2, 1)
"""Versions read too: files of version 1 do not say what nodes allocate, those of version 2 no dtypes and shapes.

Those of version 3 do not say which nodes keep memory of others: a plan then counts it for longer.
"""
HARDWARE = ("device", "capability", "clock")
"""The entries of `environment` that tell the accelerator measured on: its name, what it can do, how fast it ran."""
_PEAKS = ("forward_peak_bytes", "backward_peak_bytes", "halved_peak_bytes", "late_peak_bytes")
MEMORY = (*_PEAKS, "waiting_bytes", "lent_bytes", "unkept_bytes", "handed_bytes", "storage_bytes", "written_bytes")
"""What of a node is known only where it was measured what operators allocate."""
UNSTEADY, LEAST_MS = 0.15, 5.0
"""From which spread on a profile is called unsteady, if its nodes take so long together: less makes no difference."""


@dataclass(frozen=True)
class NodeCost:
    """One node of the graph, at microbatch size.

    - `op` is the kind of the node in torch.fx and its target, `module` the path of the submodule that the node is in
    - `signature` identifies the operator with the shapes it met: equal signatures take equal times
    - `inputs` are the nodes and graph inputs whose values the node reads
    - `forward_ms` and `backward_ms` are medians; `host_ms` is the time for both on a host device, where the profile of
      another tool states it
    - `output_bytes` are of the output, `gradient_bytes` of the gradient that returns for it, `kept_bytes` of what
      autograd keeps for backward, `parameter_bytes` of the parameters, `buffer_bytes` of buffers and of frozen
      parameters, which get no gradient
    - `draws` says that the node takes random numbers
    - `weight_ms` is the part of `backward_ms` that computes gradients of weights (None: not measured, half is assumed)
    - `spread_ms` is half the distance between the quartiles of the measured times, forward and backward together (None:
      not measured more than once)
    - `forward_launch_ms` and `backward_launch_ms` are how long the host is busy with launching the node's work on an
      accelerator, where `forward_ms` and `backward_ms` are the accelerator's own time. Both go on at once. On a CPU
      nothing is launched, and both are 0
    - `forward_peak_bytes` and `backward_peak_bytes` are the most that the node's forward and backward allocate at once,
      with what they return; `halved_peak_bytes` the same of a backward that leaves the gradients of weights for later,
      `waiting_bytes` what such a backward then holds for them, and `late_peak_bytes` what they take later (None: not
      measured, and no plan counts any)
    - `lent_bytes` are of the gradients that the node's backward returns in the memory of the one that it was given
    - `unkept_bytes` is the memory of its output that no backward keeps, `storage_bytes` all memory that its output lies
      in, `handed_bytes` the part of `parameter_bytes` whose gradients are small, and are added to their sums at the end
      of a stage's backward
    - `kept_for_bytes` are the part of `kept_bytes` that only later nodes keep, of which `kept_for` is the first: it is
      free once that node has run backward. `lies_in` is the node in whose memory the output lies, as that of a view
    - `written_bytes` are of the buffers that the node writes, as a batch norm its running statistics
    - `made` is the dtype and shape of its output, as `float32[8, 64]`, or another type's name; empty where unknown
    """

    name: str
    op: str
    module: str
    signature: str
    inputs: tuple[str, ...]
    forward_ms: float
    backward_ms: float
    output_bytes: float
    gradient_bytes: float
    kept_bytes: float
    parameter_bytes: float
    buffer_bytes: float
    draws: bool = False
    host_ms: float = 0.0
    weight_ms: float | None = None
    spread_ms: float | None = None
    forward_launch_ms: float = 0.0
    backward_launch_ms: float = 0.0
    forward_peak_bytes: float | None = None
    backward_peak_bytes: float = 0.0
    halved_peak_bytes: float = 0.0
    late_peak_bytes: float = 0.0
    waiting_bytes: float = 0.0
    lent_bytes: float = 0.0
    unkept_bytes: float = 0.0
    handed_bytes: float = 0.0
    storage_bytes: float = 0.0
    written_bytes: float = 0.0
    kept_for: str = ""
    kept_for_bytes: float = 0.0
    lies_in: str = ""
    made: str = ""

    @property
    def owner(self) -> str:
        """The path of the module that the node is in, or that it fetches a weight of; empty for the model itself."""
        # A node that fetches a weight has the weight's path, whose last part is no module.
        return self.module.rpartition(".")[0] if self.op.startswith("get_attr") else self.module

    @property
    def place(self) -> str:
        """Where the node is in the user's model: its module's path, and its own name if it is not that module.

        For example `layers.2.attention (linear_131)`; a node that is in no module has its name alone.
        """
        if not self.module:
            return self.name
        return self.module if self.op.startswith(("call_module", "get_attr")) else f"{self.module} ({self.name})"

    @property
    def launch_ms(self) -> float:
        """How long the host is busy with launching the node, forward and backward, in milliseconds."""
        return self.forward_launch_ms + self.backward_launch_ms

    @property
    def late_ms(self) -> float:
        """The ms of `backward_ms` that the gradients of weights take, which schedules such as ZB-H1 leave for later."""
        return self.backward_ms / 2 if self.weight_ms is None else self.weight_ms


@dataclass(frozen=True)
class Exchange:
    """A tensor of the backward pass that mirrors no forward value: the nodes that make or read it, in any order."""

    output_bytes: float
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class TiedParameter:
    """A parameter that several nodes hold, and each of them counts: among its parameters, or its buffers if frozen."""

    parameter_bytes: float
    buffer_bytes: float
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class InputCost:
    """One tensor that the model is called with: its name, bytes per microbatch, dtype and shape (see NodeCost)."""

    name: str
    output_bytes: float
    gradient_bytes: float
    made: str = ""


@dataclass(frozen=True, eq=False, repr=False)
class Costs(Shown, Fact):
    """The measured graph: nodes in execution order, the graph's inputs and outputs, and its constraints.

    `together` are sets of nodes that no cut may part; `ordered` are pairs that keep their order though no value flows
    between them (both as in Effects). `rows` is the microbatch size and `device_kind` the hardware, as in torch ("cpu",
    "cuda"). `exchanges` are tensors of another tool's backward graph. `inference` says that these are the costs of
    forwards alone (see `keep_forwards`). `compress` is how values that cross cuts are compressed, which is no part of a
    file (see compress.py). `tied` are parameters that several nodes hold. `loss` is what the loss takes that was behind
    the model when it was measured, None for one that nobody has measured.
    """

    nodes: tuple[NodeCost, ...]
    inputs: tuple[InputCost, ...]
    outputs: tuple[str, ...]
    together: tuple[tuple[str, ...], ...] = ()
    ordered: tuple[tuple[str, str], ...] = ()
    rows: int = 0
    device_kind: str = "cpu"
    environment: dict[str, str] = field(default_factory=dict)
    exchanges: tuple[Exchange, ...] = ()
    inference: bool = False
    compress: str = ""
    tied: tuple[TiedParameter, ...] = ()
    loss: LossCost | None = None

    made_by: ClassVar[str] = "profile"

    @cached_property
    def by_name(self) -> dict[str, NodeCost]:
        """The nodes by their names."""
        return {n.name: n for n in self.nodes}

    @property
    def total_ms(self) -> float:
        """The time of one microbatch, forward and backward, on one device: its own, or its host's if that is longer."""
        return max(self.compute_ms, self.launch_ms)

    @property
    def compute_ms(self) -> float:
        """How long one device computes for one microbatch, forward and backward."""
        return sum(n.forward_ms + n.backward_ms for n in self.nodes)

    @property
    def launch_ms(self) -> float:
        """How long the host of one device is busy with launching one microbatch, forward and backward."""
        return sum(n.launch_ms for n in self.nodes)

    @cached_property
    def weighed(self) -> bool:
        """Whether it was measured what every node allocates; else plans do not count it."""
        return all(n.forward_peak_bytes is not None for n in self.nodes)

    @cached_property
    def spread(self) -> float | None:
        """By what share the measured times vary: 0.02 on a machine at rest, for example. None where that is unknown."""
        known = [n for n in self.nodes if n.spread_ms is not None]
        total = sum(n.forward_ms + n.backward_ms for n in known)
        return sum(n.spread_ms or 0.0 for n in known) / total if total else None

    @property
    def hardware(self) -> str:
        """The accelerator that was measured on, for people; empty where there was none, or nobody knows."""
        return ", ".join(self.environment[key] for key in HARDWARE if key in self.environment)

    @property
    def noise(self) -> str | None:
        """What to say of times that were measured on a busy machine; None where they are steady or nothing is known."""
        if self.spread is None or self.spread < UNSTEADY or self.total_ms < LEAST_MS:
            return None
        return (
            f"the measured times vary by ±{100 * self.spread:.0f} % from repeat to repeat: another program ran, "
            "or the machine slowed down. The plan is the best for their medians, which may be wrong by as much. "
            "Measure again on a machine at rest, or with more repeats: profile{repeats=20}"
        )

    @cached_property
    def values(self) -> tuple[tuple[str, float, float, tuple[str, ...], bool], ...]:
        """Every value: name, bytes, bytes of its gradient, the nodes that read it, whether the model returns it."""
        sources: list[InputCost | NodeCost] = [*self.inputs, *self.nodes]
        # A node that reads a value twice gets it once.
        readers: dict[str, list[str]] = {source.name: [] for source in sources}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                readers[name].append(node.name)
        # A value that is returned is live to the end, whoever else reads it.
        returned = set(self.outputs)
        return tuple(
            (s.name, s.output_bytes, s.gradient_bytes, tuple(readers[s.name]), s.name in returned) for s in sources
        )

    @cached_property
    def value_of(self) -> dict[str, tuple[str, float, float, tuple[str, ...], bool]]:
        """The entries of `values` by their names."""
        return {value[0]: value for value in self.values}

    def find_unkept(self, name: str, output_bytes: float) -> float:
        """Return how many bytes of a value no backward keeps; all of it where that was not measured."""
        known = self.weighed and name in self.by_name
        return min(output_bytes, self.by_name[name].unkept_bytes) if known else output_bytes

    def find_surely_unkept(self, name: str, output_bytes: float) -> float:
        """Return how many bytes of a value no backward keeps, whichever other values are there: none of a view's."""
        return 0.0 if name in self.by_name and self.by_name[name].lies_in else self.find_unkept(name, output_bytes)

    def find_loss(self, outputs_bytes: float) -> LossCost:
        """Return what the loss takes of outputs of so many bytes, as it was measured, or as is assumed."""
        return LossCost.assume(outputs_bytes) if self.loss is None else self.loss

    def sum_live(self, inside: Collection[str]) -> tuple[float, float, float]:
        """Return the bytes of values, of gradients, and of both as sent, over a cut behind the nodes `inside`."""
        forward = backward = sent = 0.0
        for name, output_bytes, gradient_bytes, readers, is_output in self.values:
            # What the model is given is there from the start; what it returns is read behind every cut.
            made = name in inside or name not in self.by_name
            if made and (is_output or any(reader not in inside for reader in readers)):
                forward, backward = forward + output_bytes, backward + gradient_bytes
                sent += sum(self.sent[name])
        for exchange in self.exchanges:
            if len({name in inside for name in exchange.nodes}) == 2:
                backward, sent = backward + exchange.output_bytes, sent + exchange.output_bytes
        return forward, backward, sent

    @cached_property
    def sent(self) -> dict[str, tuple[float, float]]:
        """In how many bytes each value crosses a cut, and its gradient."""
        sources: list[InputCost | NodeCost] = [*self.inputs, *self.nodes]
        how = self.compress
        both = ((s, s.output_bytes, s.gradient_bytes) for s in sources)
        return {s.name: (count_sent_bytes(how, s.made, a), count_sent_bytes(how, s.made, b)) for s, a, b in both}

    @cached_property
    def tensors(self) -> tuple[tuple[float, tuple[str, ...]], ...]:
        """What nodes exchange: the bytes forward and back together, and the nodes that make or read the tensor."""
        made = [
            (output_bytes + gradient_bytes, (name, *readers))
            for name, output_bytes, gradient_bytes, readers, _ in self.values
            if name in self.by_name and readers
        ]
        return (*made, *((exchange.output_bytes, exchange.nodes) for exchange in self.exchanges))

    def check(self) -> None:
        """Raise ProfileError, naming the place, unless names are unique, inputs come earlier and figures are sane."""
        check_costs(self)

    def verify(self, ir: IR) -> None:
        """Raise BrokenFact unless the costs describe exactly the graph of `ir`."""
        # Placeholders and the output are no work: the costs know them as inputs and outputs.
        graph = [n.name for n in ir.gm.graph.nodes if n.op not in ("placeholder", "output")]
        if graph != [n.name for n in self.nodes]:
            odd = sorted(set(graph) ^ set(self.by_name)) or graph
            raise BrokenFact(f"the costs are of other nodes than the graph (first difference: {odd[0]!r})")
        for node in ir.gm.graph.nodes:
            cost, reads = self.by_name.get(node.name), [n.name for n in node.all_input_nodes]
            if cost is not None and name_operator(node) != cost.op:
                raise BrokenFact(f"node {node.name!r} is {name_operator(node)}, and its costs are of {cost.op}")
            if cost is not None and set(reads) != set(cost.inputs):
                raise BrokenFact(f"node {node.name!r} reads {reads}, and the costs say {list(cost.inputs)}")
            if node.op == "output" and set(reads) != set(self.outputs):
                raise BrokenFact(f"the graph returns {reads}, and the costs say {list(self.outputs)}")
        given = [n.name for n in ir.gm.graph.nodes if n.op == "placeholder"]
        if given != [i.name for i in self.inputs]:
            raise BrokenFact(f"the graph is given {given}, and the costs say {[i.name for i in self.inputs]}")
        try:
            self.check()
        except ProfileError as error:
            raise BrokenFact(str(error)) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile as `to_text` gives it; raises FileError, and then changes no file."""
        write_whole(path, self.to_text())

    def to_text(self) -> str:
        """Return the profile as JSON, one node a line; raises ProfileError for costs that `load` would refuse."""
        self.check()
        head = {"format": FORMAT, "version": VERSION, "rows": self.rows, "device_kind": self.device_kind}
        head |= {"environment": self.environment, "outputs": self.outputs}
        head |= {"together": self.together, "ordered": self.ordered}
        head |= {"inference": True} if self.inference else {}
        head |= {"loss": asdict(self.loss)} if self.loss else {}
        lists = {"inputs": [asdict(i) for i in self.inputs], "nodes": [_to_record(n) for n in self.nodes]}
        lists |= {"exchanges": [asdict(e) for e in self.exchanges]} if self.exchanges else {}
        lists |= {"tied": [asdict(t) for t in self.tied]} if self.tied else {}
        # One node a line, so that two profiles can be compared line by line.
        lines = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in head.items()]
        for key, rows in lists.items():
            lines.append(f" {json.dumps(key)}: [\n" + ",\n".join(f"  {json.dumps(r)}" for r in rows) + "\n ]")
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Costs:
        """Read a profile written by `save`; raises ProfileError for a file that is not one, naming what is wrong."""
        try:
            # A file that is no JSON, or no text, is as wrong as one that is missing.
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ProfileError(f"cannot read a profile from {str(path)!r}: {explain_unreadable(error)}") from error
        return cls.parse(data, str(path))

    @classmethod
    def parse(cls, data: Any, name: str) -> Costs:
        """Return the profile that a parsed file holds; raises ProfileError. `name` is the file's, for messages."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ProfileError(f"{name!r} is not a profile (no format {FORMAT!r}): write one with costs.save(path)")
        if data.get("version") not in (VERSION, *EARLIER):
            known = ", ".join(map(str, (VERSION, *EARLIER)))
            raise ProfileError(f"{name!r} has version {data.get('version')}, this fxsplit reads {known}")
        try:
            # A text is a sequence of names to Python, and of one letter each: `as_list` refuses it.
            costs = cls(
                nodes=tuple(NodeCost(**{**n, "inputs": as_list(n["inputs"])}) for n in data["nodes"]),
                inputs=tuple(InputCost(**i) for i in data["inputs"]),
                outputs=as_list(data["outputs"]),
                together=tuple(as_list(c) for c in data["together"]),
                ordered=tuple((a, b) for a, b in map(as_list, data["ordered"])),
                rows=data["rows"],
                device_kind=str(data["device_kind"]),
                environment={str(k): str(v) for k, v in data["environment"].items()},
                exchanges=tuple(Exchange(e["output_bytes"], as_list(e["nodes"])) for e in data.get("exchanges", ())),
                inference=bool(data.get("inference", False)),
                loss=LossCost(**data["loss"]) if data.get("loss") else None,
                tied=tuple(
                    TiedParameter(t["parameter_bytes"], t["buffer_bytes"], as_list(t["nodes"]))
                    for t in data.get("tied", ())
                ),
            )
            if not is_count(costs.rows):
                raise ProfileError(f"it has rows={show(costs.rows)}: give a whole number, zero or more")
            costs.check()
        # Fields may be missing, of another type or too many: all mean a damaged file.
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ProfileError(f"{name!r} is a damaged profile: {error}") from error
        return costs

    def summarise(self) -> str:
        """Return how many nodes there are, and what they take."""
        return f"{len(self.nodes)} nodes, {self.compute_ms:.3f} ms for a microbatch of {self.rows} rows"

    def show(self) -> Parts:
        """Return a table of the nodes, or of the largest modules if there are many nodes; then a line on measuring."""
        return list_parts(self, whole=False)

    @cached_property
    def dumped(self) -> str:
        """The section of a dump: every node, whatever their number."""
        return render(list_parts(self, whole=True))


_SELDOM = ("forward_launch_ms", "backward_launch_ms", *MEMORY[1:], "kept_for", "kept_for_bytes", "lies_in", "made")


def _to_record(node: NodeCost) -> dict[str, Any]:
    """Return the fields of a node as they are saved: launches and allocations only where there are some."""
    return {k: v for k, v in asdict(node).items() if v or k not in _SELDOM}


def name_operator(node: fx.Node) -> str:
    """Return the kind of a node in torch.fx and what it calls, as `call_module:layer` or `call_function:relu`."""
    return f"{node.op}:{node.target if isinstance(node.target, str) else getattr(node.target, '__name__', '?')}"
