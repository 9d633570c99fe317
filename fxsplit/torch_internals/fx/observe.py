"""Run a graph once on an example, and record for each node what it allocates, saves for backward, writes and draws.

Front ends say what a graph computes. Its side effects on memory and random generators can only be observed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage, fx, nn

from fxsplit.errors import FxsplitError, TraceError
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.autograd.leaves import find_leaves
from fxsplit.torch_internals.error_texts import is_refusal_of_hooks
from fxsplit.torch_internals.fake.runnable import make_runnable
from fxsplit.torch_internals.fake.snapshot import Snapshot
from fxsplit.torch_internals.fx.constant_devices import name_other_device
from fxsplit.torch_internals.fx.interpret import Interpreter, describe_tensor, find_target, get_storage_id, preserve
from fxsplit.torch_internals.random.seeded_calls import can_draw, notice_draws
from fxsplit.torch_internals.tensors.sparse_layouts import list_parts
from fxsplit.torch_internals.thread_modes import enter_saved_hooks

JOINS = ("CatBackward0", "StackBackward0")
"""The names of autograd nodes of concatenations. Their backward returns parts of one gradient."""

CUTS = ("detach_", "requires_grad_")
"""Methods that change a tensor's autograd state, but not its memory."""

KEPT = (
    "a backward runs through a tensor that was computed while a pipeline was compiled, and that a hook or an attribute "
    "of a module has kept: compile first, with example_inputs=, and then drop the tensors that hooks have kept"
)
"""The error for a backward through an observed graph, which runs forward only."""

Visit = Callable[[fx.Node, Any, tuple[Any, ...], dict[str, Any]], None]
"""Called before a node runs, with (node, its callable, arguments, keyword arguments)."""


class _BackwardInsideError(FxsplitError):
    """An observed node ran a backward inside its forward, as a module that computes forces does."""


@dataclass
class Observation:
    """The effects of one node on memory and random generators.

    text: dtype and shape of its tensor, such as `float32[8, 64]`, or the type name of any other value.
    is_container: whether its value is a container of tensors, such as the parts of a split.
    output_bytes, gradient_bytes: the size of its tensor, and of the gradient that comes back for it (0: no gradient).
    kept_bytes: the bytes of its memory that autograd saves for backward, without parameters.
    written_bytes: the bytes of the model's buffers that it wrote.
    kept_for, kept_for_bytes: the part of kept_bytes that only later nodes save, and the first of these nodes.
    owners: the nodes that allocated the memory of its value. `x.view(-1)` has the owners of `x`; a node that allocates
        is its own owner.
    mutates: the owners of the memory that it wrote to in place.
    draws: whether it draws random numbers now or in training mode. drew: whether it drew now.
    storage_bytes: the memory of its tensors, without weights. For a view, that of the whole storage.
    unkept_bytes: the part of storage_bytes that autograd does not save.
    is_turned: whether its tensor is not contiguous.
    is_read_turned: whether a reader views its tensor with dimensions in another memory order, as a transpose does. The
        gradient then comes back in that order.
    is_joined: whether its tensor was concatenated from several. The backward then returns parts of one gradient.
    is_read_joined: whether a reader concatenates its tensor with other tensors. The gradient of its tensor is then such
        a part.
    """

    text: str = "none"
    is_container: bool = False
    output_bytes: int = 0
    gradient_bytes: int = 0
    kept_bytes: int = 0
    owners: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    draws: bool = False
    drew: bool = False
    storage_bytes: int = 0
    unkept_bytes: int = 0
    is_turned: bool = False
    is_read_turned: bool = False
    is_joined: bool = False
    is_read_joined: bool = False
    kept_for: str = ""
    kept_for_bytes: int = 0
    written_bytes: int = 0


class ObservingInterpreter(Interpreter):
    """Interprets a graph in the current grad mode, and fills `seen` with an Observation of each node.

    visit: called before each call node runs.
    renamed: the device on which the graph was captured, and the device to use in its place.
    """

    def __init__(
        self, gm: fx.GraphModule, visit: Visit | None = None, renamed: tuple[torch.device, torch.device] | None = None
    ) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.seen: dict[str, Observation] = {}
        self._visit = visit
        self._renamed = renamed
        # By storage id: the node that allocated each storage, and the storages that autograd has saved.
        self._owners: dict[int, str] = {}
        self._kept: set[int] = set()
        # The storages of each node's value.
        self._made: dict[str, dict[int, UntypedStorage]] = {}
        self._nodes: list[fx.Node] = list(gm.graph.nodes)
        self._gm = gm
        self._alive: list[UntypedStorage] = []  # keeps storages alive, so that their ids are not reused
        self._buffers = {get_storage_id(b) for b in gm.buffers()}
        self._weights = self._buffers | {get_storage_id(p) for p in gm.parameters()}

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments and keyword arguments of a node."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        if self._renamed is None:
            return args, kwargs
        return name_other_device(n, args, *self._renamed), name_other_device(n, kwargs, *self._renamed)

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and observe it."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        call = find_target(self.module, n) if n.op.startswith("call") else None
        if self._visit is not None and n.op.startswith("call"):
            self._visit(n, call, args, kwargs)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        before = [t._version for t in tensors]
        held = list(call.buffers()) if isinstance(call, nn.Module) else []
        buffers = Snapshot({id(t): t for t in (*tensors, *held) if get_storage_id(t) in self._buffers}.values())
        with notice_draws() as drew:
            value, saved = self._run_and_list_saved(n, tensors)
        # Views and writes are detected by storage: tensors with the same storage share memory.
        seen = _describe(value)
        written = [t for t, version in zip(tensors, before, strict=True) if t._version != version]
        # Batch norm kernels write running statistics without counting a version, so values are compared as well.
        changed = buffers.changed()
        seen.written_bytes = sum(t.nbytes for t in changed)
        # Writes to a module's own buffers concern no other node.
        written += [t for t in changed if any(t is given for given in tensors)]
        written += tensors[:1] if n.op == "call_method" and n.target in CUTS else []
        seen.mutates = tuple(dict.fromkeys(self._owners.get(get_storage_id(t), n.name) for t in written))
        # Fetching a weight draws nothing: if a generator moved, another thread drew. A dropout in evaluation draws
        # nothing now, but will when the same graph is trained.
        seen.drew = call is not None and drew()
        seen.draws = seen.drew or (call is not None and can_draw(call))
        made = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
        seen.owners = tuple(dict.fromkeys(self._owners.setdefault(get_storage_id(t), n.name) for t in made))
        storages = [part.untyped_storage() for t in made for part in list_parts(t)]
        self._alive += storages
        self._made[n.name] = {int(storage._cdata): storage for storage in storages}
        self.seen[n.name] = seen
        self._charge(n, saved)
        return value

    def list_made(self) -> list[Tensor]:
        """Return the tensors that calls have made.

        A hook may make such a tensor require a gradient that nothing reads.
        """
        values = (self.env.get(node) for node in self._nodes if node.op.startswith("call"))
        return [t for value in values for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]

    def note_unkept(self) -> None:
        """Record how much of each node's memory autograd does not save.

        Call it after the run: a later node may save memory.
        """
        there = self._kept | self._weights
        for name, storages in self._made.items():
            self.seen[name].storage_bytes = sum(s.nbytes() for key, s in storages.items() if key not in self._weights)
            self.seen[name].unkept_bytes = sum(s.nbytes() for key, s in storages.items() if key not in there)

    def note_layouts(self) -> None:
        """Record which gradients will come back in another memory order, or as a part of a larger gradient."""
        # From the last node backwards: nodes that pass a tensor on, or compute element by element, also pass on the
        # order of its gradient. Operators with weights allocate a new gradient.
        for node in reversed(self._nodes):
            seen = self.seen[node.name]
            for reader in node.users:
                view = self.seen[reader.name]
                shares = bool(set(view.owners) & set(seen.owners))
                hands_on = shares or (view.text == seen.text and not _has_weights(self._gm, reader))
                seen.is_read_joined |= (view.is_joined and not shares) or (hands_on and view.is_read_joined)
                seen.is_read_turned |= (shares and view.is_turned != seen.is_turned) or (
                    hands_on and view.is_read_turned
                )

    def _run_and_list_saved(self, n: fx.Node, tensors: list[Tensor]) -> tuple[Any, list[UntypedStorage]]:
        """Run a node. Returns its value and the storages that autograd saves for the node's backward."""
        saved: list[UntypedStorage] = []

        def keep(tensor: Tensor) -> None:
            saved.extend(part.untyped_storage() for part in list_parts(tensor))

        def refuse_backward(_: object) -> Tensor:
            raise _BackwardInsideError(KEPT) if running else FxsplitError(KEPT)

        running = True
        # The pack hook returns None: a graph that holds `saved` would keep itself alive for ever.
        try:
            with enter_saved_hooks(keep, refuse_backward):
                return super().run_node(n), saved
        except _BackwardInsideError:
            saved.clear()  # the node runs a backward itself, which needs the tensors that the hook replaced
        except RuntimeError as error:
            if not is_refusal_of_hooks(error):
                raise
        finally:
            running = False
        # torch.func refuses hooks on saved tensors. Assume that it saves all tensors that the node reads.
        return super().run_node(n), [part.untyped_storage() for t in tensors for part in list_parts(t)]

    def _charge(self, n: fx.Node, saved: list[UntypedStorage]) -> None:
        """Count each newly saved storage for the node that allocated it, or for `n` if no node's value holds it."""
        for storage in saved:
            key = int(storage._cdata)
            # Weights stay in memory anyway, and a storage saved by two nodes is counted once.
            if key in self._weights or key in self._kept:
                continue
            self._kept.add(key)
            self._alive.append(storage)
            name = self._owners.get(key, n.name)
            owner = self.seen.get(name)
            if owner is None:
                continue
            owner.kept_bytes += storage.nbytes()
            # If several later nodes save it, the first of them runs backward last.
            if name != n.name:
                owner.kept_for = owner.kept_for or n.name
                owner.kept_for_bytes += storage.nbytes()


def observe(
    gm: fx.GraphModule,
    tensors: Sequence[Tensor],
    visit: Visit | None = None,
    *,
    from_shapes: bool = False,
    device: torch.device | None = None,
) -> dict[str, Observation]:
    """Run `gm` on copies of `tensors` in grad mode, and return an Observation of each node, by the node's name.

    visit: called before each call node runs.
    from_shapes: compute no values; derive all observations from the shapes of the weights and of `tensors`.
    device: with `from_shapes`, the assumed device of the weights and of `tensors`; it need not exist.
    Buffers, random generators and gradients are restored afterwards. Raises TraceError for a graph that trains a tensor
    that is not a parameter.
    """
    renamed = None if device is None else (tensors[0].device, device)
    with make_runnable(gm, tensors, from_shapes, device) as (own, given), preserve(own), torch.enable_grad():
        observer = ObservingInterpreter(own, visit, renamed)
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in given]
        # Clones, because autograd refuses in-place writes to a leaf.
        result = observer.run(*(leaf.clone() for leaf in leaves))
        observer.note_unkept()
        observer.note_layouts()
        # A leaf captured in a closure would be trained by the model, but by no stage.
        known = {id(t) for t in (*own.parameters(), *own.buffers(), *leaves, *observer.list_made())}
        foreign = [leaf for leaf in _list_leaves(result) if id(leaf) not in known]
        if foreign:
            # A leaf that the model makes in each call, for an inner gradient, differs in the next call.
            again = fx.Interpreter(own).run(*(leaf.clone() for leaf in leaves))
            held = {id(leaf) for leaf in _list_leaves(again)}
            foreign = [leaf for leaf in foreign if id(leaf) in held]
    if foreign:
        raise TraceError(
            f"the model trains a tensor ({describe_tensor(foreign[0])}) that is not one of its parameters, so no "
            "stage would own it: make it a parameter of the model, or give it as an argument to a function marked with "
            "torch.fx.wrap"
        )
    return observer.seen


def _list_leaves(result: Any) -> list[Tensor]:
    """Return the leaves of autograd's graph on which the tensors of a result depend."""
    return [leaf for t in pytree.tree_leaves(result) if isinstance(t, Tensor) for leaf in find_leaves(t)]


def _is_joined(value: Tensor) -> bool:
    """Return whether a tensor is the result of a concatenation, according to autograd."""
    return value.grad_fn is not None and value.grad_fn.name() in JOINS


def _has_weights(gm: nn.Module, node: fx.Node) -> bool:
    """Return whether a node computes with parameters: its module has some, or it reads one."""
    if node.op == "call_module" and any(True for _ in gm.get_submodule(str(node.target)).parameters()):
        return True
    fetched = (find_target(gm, i) for i in node.all_input_nodes if i.op == "get_attr")
    return any(isinstance(target, nn.Parameter) for target in fetched)


def _describe(value: Any) -> Observation:
    """Describe a value on its own: its text, whether it is a container, and its size."""
    if isinstance(value, Tensor):
        size = value.numel() * value.element_size()
        turned = value.layout is torch.strided and not value.is_contiguous()
        text, gradient = describe_tensor(value), size if value.requires_grad else 0
        return Observation(text, False, size, gradient, is_turned=turned, is_joined=_is_joined(value))
    leaves = pytree.tree_leaves(value)
    return Observation(type(value).__name__, is_container=any(isinstance(leaf, Tensor) for leaf in leaves))
