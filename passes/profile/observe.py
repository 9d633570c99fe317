"""Run a graph once on the example and note what each node makes, keeps for backward and writes in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage, fx

from fxsplit.errors import TraceError
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.fake_weights import Snapshot, make_runnable
from fxsplit.torch_internals.grad_leaves import find_leaves
from fxsplit.torch_internals.interpret import Interpreter, describe_tensor, get_storage_id, preserve
from fxsplit.torch_internals.rng import can_draw, read_generators

CUTS = ("detach_", "requires_grad_")
"""Methods that write to what autograd knows of a tensor, and not to its memory."""


Visit = Callable[[fx.Node, Any, tuple[Any, ...], dict[str, Any]], None]
"""Called before a node runs, with (node, the callable behind it, its arguments, its keyword arguments)."""


@dataclass
class Observation:
    """What one node did.

    `output_bytes` counts its tensor, `gradient_bytes` the gradient that returns for it (0 where none does),
    `kept_bytes` what autograd keeps because of it, besides parameters. `owners` are the nodes whose memory its value
    shares (itself where it made its own), `mutates` the owners of the memory it wrote to, and `draws` says that it
    takes random numbers, now or in training mode.
    """

    text: str = "none"
    is_container: bool = False
    output_bytes: int = 0
    gradient_bytes: int = 0
    kept_bytes: int = 0
    owners: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    draws: bool = False


@dataclass
class _Memory:
    """Who made each storage, and which storages autograd keeps already."""

    owners: dict[int, str] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    alive: list[Any] = field(default_factory=list)  # a freed storage's address would be used again


class Observer(Interpreter):
    """Interprets a graph in the current grad mode and fills `seen`, one Observation for each node."""

    def __init__(self, gm: fx.GraphModule, visit: Visit | None = None) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.seen: dict[str, Observation] = {}
        self._visit = visit
        self._memory = _Memory()
        weights = (*gm.parameters(), *gm.buffers())
        self._weights = {get_storage_id(w) for w in weights}
        self._buffers = {get_storage_id(b) for b in gm.buffers()}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and observe it."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if self._visit is not None and n.op.startswith("call"):
            self._visit(n, self._callable(n), args, kwargs)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        before = [t._version for t in tensors]
        buffers = Snapshot(t for t in tensors if get_storage_id(t) in self._buffers)
        generators = read_generators()
        saved: list[UntypedStorage] = []
        # Nothing is kept in the graph itself, which no one will backward: it would keep this list, and leak.
        try:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.untyped_storage()), _no_backward):
                value = super().run_node(n)
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):  # torch.func wants none; what it keeps is told by what it reads
                raise
            value, saved = super().run_node(n), [t.untyped_storage() for t in tensors]
        seen = _describe(value)
        written = [t for t, version in zip(tensors, before, strict=True) if t._version != version]
        written += buffers.changed()  # batch norm's kernels count no version
        written += tensors[:1] if n.op == "call_method" and n.target in CUTS else []
        seen.mutates = tuple(dict.fromkeys(self._memory.owners.get(get_storage_id(t), n.name) for t in written))
        drew = generators != read_generators()
        seen.draws = drew or (n.op == "call_module" and can_draw(self._callable(n)))
        made = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
        seen.owners = tuple(dict.fromkeys(self._memory.owners.setdefault(get_storage_id(t), n.name) for t in made))
        self._memory.alive += [t.untyped_storage() for t in made]
        self.seen[n.name] = seen
        self._charge(n, saved)
        return value

    def _callable(self, n: fx.Node) -> Any:
        """Return what a call node calls: a module, a function, or the name of a method."""
        return self.fetch_attr(str(n.target)) if n.op == "call_module" else n.target

    def _charge(self, n: fx.Node, saved: list[UntypedStorage]) -> None:
        """Charge each newly kept storage to the node whose value it is, or to `n` where it is internal to it."""
        for storage in saved:
            key = int(storage._cdata)
            if key in self._weights or key in self._memory.kept:
                continue
            self._memory.kept.add(key)
            self._memory.alive.append(storage)
            owner = self.seen.get(self._memory.owners.get(key, n.name))
            if owner is not None:
                owner.kept_bytes += storage.nbytes()


def observe(
    gm: fx.GraphModule, tensors: Sequence[Tensor], visit: Visit | None = None, from_shapes: bool = False
) -> dict[str, Observation]:
    """Return what each node of `gm` does with copies of `tensors`, in grad mode; nothing of it lasts.

    `from_shapes`: it is not run, and what it would do is told from the shapes of its weights and of `tensors`.
    """
    with make_runnable(gm, tensors, from_shapes) as (own, given), preserve(own), torch.enable_grad():
        observer = Observer(own, visit)
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in given]
        result = observer.run(*(leaf.clone() for leaf in leaves))  # a leaf could not be written to in place
        known = {id(t) for t in (*own.parameters(), *own.buffers(), *leaves)}
        outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        foreign = next((leaf for t in outputs for leaf in find_leaves(t) if id(leaf) not in known), None)
    if foreign is not None:
        raise TraceError(
            f"the model trains a tensor ({describe_tensor(foreign)}) that is none of its parameters, so no stage "
            "would own it: make it a parameter of the model, or hand it to a function marked with torch.fx.wrap"
        )
    return observer.seen


def _no_backward(packed: object) -> Tensor:
    """Refuse to unpack: an observed graph is never backwarded."""
    raise RuntimeError("an observed graph kept nothing to run backward with")


def _describe(value: Any) -> Observation:
    """Return the observation of a value by itself."""
    if isinstance(value, Tensor):
        size = value.numel() * value.element_size()
        return Observation(describe_tensor(value), False, size, size if value.requires_grad else 0)
    leaves = pytree.tree_leaves(value)
    return Observation(type(value).__name__, is_container=any(isinstance(leaf, Tensor) for leaf in leaves))
