"""Costs: the time and memory of each node, and the graph that the nodes form.

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
from fxsplit.ir.facts.costs.estimated import Estimated
from fxsplit.ir.facts.costs.loss import LossCost
from fxsplit.ir.facts.costs.text import list_parts
from fxsplit.ir.graph import IR, Fact
from fxsplit.ir.text.records import Record, Row, list_values, order_columns
from fxsplit.system.figures import as_list, format_count, is_count, show
from fxsplit.system.files import explain_unreadable, write_whole
from fxsplit.system.shown import Parts, Shown, render

if TYPE_CHECKING:  # planning from a profile needs no torch
    from torch import fx

FORMAT = "fxsplit-profile"
VERSION = 4
EARLIER = (3, 2, 1)
"""Older versions that can be read. Version 1 lacks the allocations of nodes, and version 2 dtypes and shapes.

Version 3 does not say which nodes keep memory for later ones, so a plan counts that memory for longer.
"""
HARDWARE = ("device", "capability", "clock")
"""The entries of `environment` about the accelerator of the measurement: its name, capability and clock."""
_PEAKS = ("forward_peak_bytes", "backward_peak_bytes", "halved_peak_bytes", "late_peak_bytes")
MEMORY = (*_PEAKS, "waiting_bytes", "lent_bytes", "unkept_bytes", "handed_bytes", "storage_bytes", "written_bytes")
"""Fields of a node that are known only if the allocations of operators were measured."""
UNSTEADY, LEAST_MS = 0.15, 5.0
"""The spread above which a profile is called unsteady, and the least total time for which the spread matters."""


@dataclass(frozen=True)
class NodeCost:
    """The costs of one node of the graph for one microbatch.

    - `op` is the kind of the node in torch.fx and its target, `module` the path of the submodule that holds the node
    - `signature` identifies the operator with the shapes of its arguments: equal signatures take equal times
    - `inputs` are the nodes and graph inputs that the node reads
    - `forward_ms` and `backward_ms` are medians; `host_ms` is the time of both on a host device, if the profile comes
      from a tool that states it
    - `output_bytes` is the size of the output, `gradient_bytes` of its gradient, `kept_bytes` of the activations that
      autograd keeps for backward, `parameter_bytes` of the parameters, and `buffer_bytes` of buffers and of frozen
      parameters, which get no gradient
    - `draws`: the node draws random numbers
    - `weight_ms` is the part of `backward_ms` that computes gradients of weights (None: not measured, half is assumed)
    - `spread_ms` is half the interquartile range of the measured times of forward and backward together (None: not
      measured more than once)
    - `forward_launch_ms` and `backward_launch_ms` are the times in which the host launches the node's work on an
      accelerator, while `forward_ms` and `backward_ms` are times of the accelerator itself. Host and accelerator work
      at the same time. On a CPU nothing is launched, and both are 0
    - `forward_peak_bytes` and `backward_peak_bytes` are the most that the node's forward and backward allocate at once,
      including their results. `halved_peak_bytes` is the same for a backward that leaves the gradients of weights for
      later, `waiting_bytes` the memory that such a backward then holds for them, and `late_peak_bytes` the memory that
      computing them takes later (None: not measured, and no plan counts allocations)
    - `lent_bytes` is the size of the gradients that the node's backward returns in the memory of its incoming gradient
    - `unkept_bytes` is the memory of the output that no backward keeps, `storage_bytes` all memory that the output lies
      in, and `handed_bytes` the part of `parameter_bytes` with small gradients: these are added to their sums at the
      end of a stage's backward
    - `kept_for_bytes` is the part of `kept_bytes` that only later nodes keep, and `kept_for` the first of these nodes:
      the memory is free after the backward of that node. `lies_in` is the node whose memory holds the output, if the
      output is a view
    - `written_bytes` is the size of the buffers that the node writes, such as the running statistics of a batch norm
    - `made` is the dtype and shape of the output, such as `float32[8, 64]`, or the name of another type; empty if
      unknown
    - `kind` is the class of operators that takes most of the node's time, such as `matmul`, if the time was estimated.
      `spread_ms` is then the error of most estimates for this class
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
    kind: str = ""

    @property
    def owner(self) -> str:
        """The path of the module that holds the node, or the weight that the node fetches; empty for the model."""
        # A node that fetches a weight has the weight's path, and its last part is no module.
        return self.module.rpartition(".")[0] if self.op.startswith("get_attr") else self.module

    @property
    def place(self) -> str:
        """The place of the node in the user's model: the path of its module, with the node's name if it is inside.

        For example `layers.2.attention (linear_131)`. A node outside of any module has only its name.
        """
        if not self.module:
            return self.name
        return self.module if self.op.startswith(("call_module", "get_attr")) else f"{self.module} ({self.name})"

    @property
    def launch_ms(self) -> float:
        """The time in which the host launches the node, forward and backward, in milliseconds."""
        return self.forward_launch_ms + self.backward_launch_ms

    @property
    def late_ms(self) -> float:
        """The part of `backward_ms` that computes gradients of weights.

        Schedules such as ZB-H1 leave this part for later.
        """
        return self.backward_ms / 2 if self.weight_ms is None else self.weight_ms


@dataclass(frozen=True)
class Exchange:
    """A tensor of the backward pass without a counterpart in the forward pass, and the nodes that make or read it."""

    output_bytes: float
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class TiedParameter:
    """A parameter that several nodes use.

    Each of them counts it in its parameters or, if it is frozen, in its buffers.
    """

    parameter_bytes: float
    buffer_bytes: float
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class InputCost:
    """One tensor input of the model: its name, bytes per microbatch, dtype and shape (see NodeCost)."""

    name: str
    output_bytes: float
    gradient_bytes: float
    made: str = ""


@dataclass(frozen=True, eq=False, repr=False)
class Costs(Shown, Fact):
    """The measured graph: nodes in execution order, the graph's inputs and outputs, and its constraints.

    - `together` lists sets of nodes that no cut may separate, and `ordered` pairs that keep their order although no
      value flows between them (both as in Effects)
    - `rows` is the microbatch size, and `device_kind` the hardware as torch names it ("cpu", "cuda")
    - `exchanges` are tensors of the backward graph, if the profile is of another tool
    - `inference`: these are the costs of only the forward passes (see `keep_forwards`)
    - `compress` is the compression of values that cross cuts; it is not saved in files (see compress.py)
    - `tied` are parameters that several nodes use
    - `loss` is the memory of the loss function of the measurement, or None if no loss was measured
    - `fixed_rows` are the sizes of microbatches that the graph is for, if forward() makes its number of rows a constant
    - `estimated` says what the times were estimated for; None if they were measured
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
    fixed_rows: tuple[int, ...] = ()
    estimated: Estimated | None = None

    made_by: ClassVar[str] = "profile"

    @cached_property
    def by_name(self) -> dict[str, NodeCost]:
        """The nodes by their names."""
        return {n.name: n for n in self.nodes}

    @property
    def total_ms(self) -> float:
        """The forward and backward time of a microbatch on one device, or of its host if that takes longer."""
        return max(self.compute_ms, self.launch_ms)

    @property
    def compute_ms(self) -> float:
        """The time in which one device computes one microbatch, forward and backward."""
        return sum(n.forward_ms + n.backward_ms for n in self.nodes)

    @property
    def launch_ms(self) -> float:
        """The time in which the host of one device launches one microbatch, forward and backward."""
        return sum(n.launch_ms for n in self.nodes)

    @cached_property
    def weighed(self) -> bool:
        """Whether the allocations of every node were measured. Otherwise plans do not count allocations."""
        return all(n.forward_peak_bytes is not None for n in self.nodes)

    @cached_property
    def spread(self) -> float | None:
        """The relative spread of the measured times, 0.02 on a machine at rest, for example. None if it is unknown."""
        known = [n for n in self.nodes if n.spread_ms is not None]
        total = sum(n.forward_ms + n.backward_ms for n in known)
        return sum(n.spread_ms or 0.0 for n in known) / total if total else None

    @property
    def hardware(self) -> str:
        """The accelerator of the measurement, as a text; empty if there was none or it is unknown."""
        return ", ".join(self.environment[key] for key in HARDWARE if key in self.environment)

    @property
    def noise(self) -> str | None:
        """A warning if the times were measured on a busy machine. None if they are steady, or if this is unknown."""
        if self.estimated or self.spread is None or self.spread < UNSTEADY or self.total_ms < LEAST_MS:
            return None
        return (
            f"the measured times vary by ±{100 * self.spread:.0f} % from repeat to repeat: another program ran, "
            "or the machine slowed down. The plan is the best for their medians, which may be wrong by as much. "
            "Measure again on a machine at rest, or with more repeats: profile{repeats=20}"
        )

    @cached_property
    def values(self) -> tuple[tuple[str, float, float, tuple[str, ...], bool], ...]:
        """Every value: its name, bytes, bytes of its gradient, its readers, and whether the model returns it."""
        sources: list[InputCost | NodeCost] = [*self.inputs, *self.nodes]
        # A node that reads a value twice gets it once.
        readers: dict[str, list[str]] = {source.name: [] for source in sources}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                readers[name].append(node.name)
        # A returned value is live to the end, whichever nodes read it.
        returned = set(self.outputs)
        return tuple(
            (s.name, s.output_bytes, s.gradient_bytes, tuple(readers[s.name]), s.name in returned) for s in sources
        )

    @cached_property
    def value_of(self) -> dict[str, tuple[str, float, float, tuple[str, ...], bool]]:
        """The entries of `values` by their names."""
        return {value[0]: value for value in self.values}

    def find_unkept(self, name: str, output_bytes: float) -> float:
        """Return the bytes of a value that no backward keeps. If that was not measured, return all of its bytes."""
        known = self.weighed and name in self.by_name
        return min(output_bytes, self.by_name[name].unkept_bytes) if known else output_bytes

    def find_surely_unkept(self, name: str, output_bytes: float) -> float:
        """Return the bytes of a value that surely no backward keeps.

        0 for a view: another node may keep the memory that the view shares.
        """
        return 0.0 if name in self.by_name and self.by_name[name].lies_in else self.find_unkept(name, output_bytes)

    def find_loss(self, outputs_bytes: float) -> LossCost:
        """Return the memory of the loss for outputs of this size. If it was not measured, return an assumption."""
        return LossCost.assume(outputs_bytes) if self.loss is None else self.loss

    def sum_live(self, inside: Collection[str]) -> tuple[float, float, float]:
        """Return the bytes of all values that cross a cut after the nodes `inside`, of their gradients, and as sent."""
        forward = backward = sent = 0.0
        for name, output_bytes, gradient_bytes, readers, is_output in self.values:
            # Inputs exist from the start, and outputs are read after every cut.
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
        """The bytes in which each value, and its gradient, crosses a cut."""
        sources: list[InputCost | NodeCost] = [*self.inputs, *self.nodes]
        how = self.compress
        both = ((s, s.output_bytes, s.gradient_bytes) for s in sources)
        return {s.name: (count_sent_bytes(how, s.made, a), count_sent_bytes(how, s.made, b)) for s, a, b in both}

    @cached_property
    def tensors(self) -> tuple[tuple[float, tuple[str, ...]], ...]:
        """The tensors that nodes exchange: the bytes of each, forward and back together, and its nodes."""
        made = [
            (output_bytes + gradient_bytes, (name, *readers))
            for name, output_bytes, gradient_bytes, readers, _ in self.values
            if name in self.by_name and readers
        ]
        return (*made, *((exchange.output_bytes, exchange.nodes) for exchange in self.exchanges))

    def check(self) -> None:
        """Raise ProfileError, which names the place, for costs that cannot be right (see check_costs)."""
        check_costs(self)

    def verify(self, ir: IR) -> None:
        """Raise BrokenFact unless the costs describe exactly the graph of `ir`."""
        # Placeholders and the output are no work: the costs list them as inputs and outputs.
        graph = [n.name for n in ir.gm.graph.nodes if n.op not in ("placeholder", "output")]
        if graph != [n.name for n in self.nodes]:
            odd = sorted(set(graph) ^ set(self.by_name)) or graph
            raise BrokenFact(f"the costs describe other nodes than the graph (first difference: {odd[0]!r})")
        for node in ir.gm.graph.nodes:
            cost, reads = self.by_name.get(node.name), [n.name for n in node.all_input_nodes]
            if cost is not None and name_operator(node) != cost.op:
                raise BrokenFact(f"node {node.name!r} is {name_operator(node)}, and its costs are for {cost.op}")
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
        """Write the profile as JSON. Raises FileError, and then leaves an existing file unchanged."""
        write_whole(path, self.to_text())

    def to_text(self) -> str:
        """Return the profile as JSON, with a line for each node.

        Raises ProfileError for costs that `load` would refuse.
        """
        self.check()
        head = {"format": FORMAT, "version": VERSION, "rows": self.rows, "device_kind": self.device_kind}
        head |= {"environment": self.environment, "outputs": self.outputs}
        head |= {"together": self.together, "ordered": self.ordered}
        head |= {"inference": True} if self.inference else {}
        head |= {"loss": asdict(self.loss)} if self.loss else {}
        head |= {"fixed_rows": self.fixed_rows} if self.fixed_rows else {}
        head |= {"estimated": self.estimated.to_json()} if self.estimated else {}
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
        """Read a profile written by `save`; raises ProfileError, with the reason, for a file that is not a profile."""
        try:
            # A file that is not JSON, or not text, is as wrong as a missing file.
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ProfileError(f"cannot read a profile from {str(path)!r}: {explain_unreadable(error)}") from error
        return cls.parse(data, str(path))

    @classmethod
    def parse(cls, data: Any, name: str) -> Costs:
        """Return the profile from the contents of a file, parsed as JSON. Raises ProfileError.

        `name`: the name of the file.
        """
        if isinstance(data, dict) and "stages" in data and data.get("format") != FORMAT:
            raise ProfileError(f"{name!r} is a plan, and a profile is needed: give the file of costs.save(path)")
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ProfileError(f"{name!r} is not a profile (no format {FORMAT!r}): write one with costs.save(path)")
        if data.get("version") not in (VERSION, *EARLIER):
            known = ", ".join(map(str, (VERSION, *EARLIER)))
            raise ProfileError(f"{name!r} has version {data.get('version')}, this fxsplit reads {known}")
        try:
            # Python sees a string as a sequence of one-letter names; `as_list` refuses it.
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
                fixed_rows=as_list(data.get("fixed_rows", [])),
                estimated=Estimated.parse(data.get("estimated")),
                tied=tuple(
                    TiedParameter(t["parameter_bytes"], t["buffer_bytes"], as_list(t["nodes"]))
                    for t in data.get("tied", ())
                ),
            )
            for rows in (costs.rows, *costs.fixed_rows):
                if not is_count(rows):
                    raise ProfileError(f"it has rows={show(rows)}: give a whole number, zero or more")
            costs.check()
        # Fields may be missing, of another type or too many: in each case the file is damaged.
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ProfileError(f"{name!r} is a damaged profile: {error}") from error
        return costs

    def to_record(self, ir: IR) -> Record:
        """Return the costs as they are stored in an IR's text: a table of the nodes, and the other fields."""
        tables = {name: order_columns(cls, getattr(self, name)) for name, cls in _TABLES.items() if getattr(self, name)}
        rows = {"loss": self.loss, "estimated": self.estimated}
        single = {name: [list_values(row)] for name, row in rows.items() if row is not None}
        return Record("Costs", {**list_values(self), **tables, **single})

    @classmethod
    def from_record(cls, record: Record, ir: IR) -> Costs:
        """Return the costs of a record; raises IRSyntaxError."""
        tables: Row = {name: record.read_rows(kind, name) for name, kind in _TABLES.items()}
        loss, estimated = record.read_rows(LossCost, "loss"), record.read_rows(Estimated, "estimated")
        single = {"loss": loss[0] if loss else None, "estimated": estimated[0] if estimated else None}
        costs = record.make(cls, tables | single)
        try:
            costs.check()
        except (ProfileError, TypeError) as error:
            record.fail(str(error))
        return costs

    def summarise(self) -> str:
        """Return the number of nodes and their total time."""
        nodes, rows = format_count(len(self.nodes), "node"), format_count(self.rows, "row")
        return f"{nodes}, {self.compute_ms:.3f} ms for a microbatch of {rows}"

    def show(self) -> Parts:
        """Return a table of the nodes, or of the largest modules if there are many nodes; then a line on measuring."""
        return list_parts(self, whole=False)

    @cached_property
    def dumped(self) -> str:
        """The section of a dump: every node, whatever their number."""
        return render(list_parts(self, whole=True))


_TABLES: dict[str, Any] = {"nodes": NodeCost, "inputs": InputCost, "exchanges": Exchange, "tied": TiedParameter}
_LAUNCHES = ("forward_launch_ms", "backward_launch_ms")
_SELDOM = (*_LAUNCHES, *MEMORY[1:], "kept_for", "kept_for_bytes", "lies_in", "made", "kind")


def _to_record(node: NodeCost) -> dict[str, Any]:
    """Return the fields of a node for a file. Fields about launches and allocations are left out if they are zero."""
    return {k: v for k, v in asdict(node).items() if v or k not in _SELDOM}


def name_operator(node: fx.Node) -> str:
    """Return the kind of a node in torch.fx and its target, such as `call_module:layer` or `call_function:relu`."""
    return f"{node.op}:{node.target if isinstance(node.target, str) else getattr(node.target, '__name__', '?')}"
