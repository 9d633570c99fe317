"""Subject: the model to capture, and the call of the model that its graph is for.

`capture` makes a Subject. Each front end makes a graph from it, and a check runs the model and the graph on its rows:

    Subject  ->  front end: attempt(subject)  ->  Graph  ->  check_graph(subject, gm, rows)  ->  CallEffects
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from fxsplit.errors import TraceError, suggest
from fxsplit.frontend.layer_drop import NeverDropped
from fxsplit.ir.facts.capture.call import Call, Inputs
from fxsplit.ir.facts.capture.python_state import NumberPlace
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.fake.runnable import make_runnable, make_up_weights
from fxsplit.torch_internals.fake.values import has_values
from fxsplit.torch_internals.nn.containers import to_plain_outputs
from fxsplit.torch_internals.nn.torch_transformers import ask_no_values, take_masks_as_given
from fxsplit.torch_internals.random.generators import read_generators, read_python_generators
from fxsplit.torch_internals.thread_modes import enter_function_mode


class RunOfModel(NamedTuple):
    """The results of a run of the model.

    - `outputs`: its outputs
    - `buffers`: the values that it leaves in its buffers
    - `arguments`: the tensors of the call after the run, since forward() may write to them
    - `rewritten`: the names of arguments, other than tensors, that it changes
    - `gradients`: the gradients of parameters, then of inputs, None for one that no output depends on; or None if this
      run has not taken any
    """

    outputs: Any
    buffers: list[Tensor]
    arguments: Sequence[Tensor]
    rewritten: list[str]
    gradients: Sequence[Tensor | None] | None


@dataclass(eq=False)
class FirstRun:
    """The first run of a model, kept so that a check and a trial on the same tensors need no run of their own.

    - `tensors`: the tensors of the call before the run
    - `ran`: the results, with gradients; None if there is no such run, or no longer
    - `generators`: the states of all random generators before the run
    """

    tensors: Sequence[Tensor] = ()
    ran: RunOfModel | None = None
    generators: object = None

    def find(self, tensors: Sequence[Tensor]) -> RunOfModel | None:
        """Return the run if it is of these tensors; None if it is not, or if anything has drawn since."""
        # If tracing has drawn a number, another run of the model draws another one, and the graph has it as a constant.
        if self.ran is None or self.generators != (read_generators(), read_python_generators()):
            return None
        pairs = [*zip(self.tensors, tensors, strict=True)]
        return self.ran if all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs) else None

    def forget(self) -> None:
        """Free the memory of the run."""
        self.tensors, self.ran = (), None


@dataclass(frozen=True, eq=False)
class Subject:
    """A model in its present mode, with one batch of tensors for its call.

    - `rows`: the size of the largest microbatch, at most that of the batch
    - `divided`: the sizes of all microbatches in order, if they are known
    - `whole`: paths of submodules that must stay one call each in the graph
    - `from_shapes`: the model computes only shapes, as it must if weights have no values
    - `asks_for_gradients`: forward() looks at whether gradients are enabled, or whether a weight requires one
    - `numbers`: Python numbers that become inputs of the graph if forward() only does arithmetic with them
    - `outputs`: outputs of earlier runs on fake tensors, by number of rows, so that the model need not run again
    - `made_up`: the weights have made-up values in place of their own; `from_shapes` is then false
    - `apart`: outputs and gradients of the model and of its graph are compared in separate runs. This is so if each
      call of the model changes a Python value that other code may read, or if forward() takes gradients by itself
    - `empty_caches`: undoes changes that calls of the model have made outside of it, for example to a cache
    - `first`: the first run of the model on `rows` rows, which checks and trials use in place of another run
    """

    model: nn.Module
    inputs: Inputs
    tensors: Sequence[Tensor]
    rows: int
    whole: tuple[str, ...] = ()
    from_shapes: bool = False
    asks_for_gradients: bool = False
    numbers: tuple[NumberPlace, ...] = ()
    outputs: dict[int, Any] = field(default_factory=dict)
    divided: tuple[int, ...] = ()
    made_up: bool = False
    apart: bool = False
    empty_caches: Callable[[], None] = lambda: None
    first: FirstRun = field(default_factory=FirstRun)

    @property
    def name(self) -> str:
        """The name of the model's class, for messages."""
        return type(self.model).__name__

    @cached_property
    def batch(self) -> int:
        """The number of rows in the whole batch."""
        return self.inputs.count_rows(self.tensors)

    @property
    def is_cut(self) -> bool:
        """Whether a batch becomes several microbatches, so that outputs have to be joined."""
        return self.rows < self.batch

    @property
    def sizes(self) -> list[int]:
        """The different sizes of microbatches, the largest first."""
        return sorted({self.rows, *self.divided}, reverse=True)

    def take_rows(self, rows: int) -> list[Tensor]:
        """Return the first `rows` rows of each tensor. If the batch has only one row, return that row twice."""
        # Only a batch of a single row is ever too small.
        narrow = rows <= self.batch
        return self.inputs.take_rows(self.tensors, rows) if narrow else self.inputs.double_rows(self.tensors)

    def check_whole(self) -> None:
        """Raise TraceError for a path in `whole` at which the model has no submodule."""
        known = dict(self.model.named_modules(remove_duplicate=False))
        unknown = next((path for path in self.whole if path not in known or not path), None)
        if unknown is not None:
            children = ", ".join(name for name, _ in self.model.named_children())
            raise TraceError(
                f"fxsplit.leaf({unknown!r}): {self.name} has no such submodule; it has {children}"
                f"{suggest(unknown, known)}"
            )

    @contextmanager
    def make_runnable(self, rows: int, *graphs: fx.GraphModule) -> Iterator[Runnable]:
        """Yield the model, and captured graphs of it, ready to run on the first `rows` rows of the example.

        If the model cannot run as it is, the graphs and the model hold copies of the weights, or fake tensors.
        """
        # One list of modules, since all must hold the same weights: copied once, or replaced once by fake tensors.
        modules = nn.ModuleList([self.model, *graphs])
        given = self.take_rows(rows)
        ready = make_up_weights(modules, given) if self.made_up else make_runnable(modules, given, self.from_shapes)
        with ready as (here, tensors):
            asks, first = self.asks_for_gradients, self.first
            yield Runnable(self.name, here, self.inputs, tensors, rows, asks, self.apart, self.outputs, first)


@dataclass(frozen=True, eq=False)
class Runnable:
    """A subject's model, a graph of it if one was given, and rows for them, all on one device.

    name: the name of the model's class, for messages.
    modules: the model, then the graph. They are the subject's own, or copies in host memory if the weights are on
        several devices, or they hold fake tensors.
    rows: the number of rows in the tensors.

    The other fields are as in Subject.
    """

    name: str
    modules: nn.ModuleList
    inputs: Inputs
    tensors: list[Tensor]
    rows: int
    asks_for_gradients: bool = False
    apart: bool = False
    outputs: dict[int, Any] = field(default_factory=dict)
    first: FirstRun = field(default_factory=FirstRun)

    @property
    def model(self) -> nn.Module:
        """The model that runs."""
        return self.modules[0]

    @property
    def graph(self) -> fx.GraphModule:
        """The graph that runs."""
        graph = self.modules[1]
        assert isinstance(graph, fx.GraphModule)
        return graph

    def clone_tensors(self) -> list[Tensor]:
        """Return copies of the rows. forward() may write to its arguments, and the rows belong to the caller."""
        return [t.detach().clone() for t in self.tensors]

    def clone_doubled(self) -> list[Tensor]:
        """Return the tensors with every row twice."""
        return [t.detach().clone() for t in self.inputs.double_rows(self.tensors)]

    def note_outputs(self, returned: Any) -> None:
        """Record the model's outputs for these rows, if they are fake tensors: another run would return the same."""
        if not has_values(self.tensors[0]):
            self.outputs[self.rows] = pytree.tree_map_only(Tensor, lambda t: t.detach(), to_plain_outputs(returned))

    def run_model(self, *tensors: Tensor) -> Any:
        """Return the output of the model's forward(), with these tensors in place of the call's own."""
        return self.run_call(self.inputs.make_call(tensors))

    def run_call(self, call: Call) -> Any:
        """Return the output of the model's forward() for a call."""
        kept = enter_function_mode(NeverDropped()) if self.model.training else nullcontext()
        with kept, take_masks_as_given() if has_values(self.tensors[0]) else ask_no_values():
            # forward() instead of model(...), since the model's own hooks run around the whole pipeline, and no graph
            # holds them.
            return self.model.forward(*call.args, **call.kwargs)
