"""Run a graph once on an example, and note what each node makes, keeps for its backward, writes and draws.

Front ends say what a graph computes. What it does besides, to memory and to random generators, can only be observed.
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
from fxsplit.torch_internals.fake.fake_weights import Snapshot, make_runnable
from fxsplit.torch_internals.fx.graph_devices import name_other_device
from fxsplit.torch_internals.fx.interpret import Interpreter, describe_tensor, find_target, get_storage_id, preserve
from fxsplit.torch_internals.random.seeded_calls import can_draw, notice_draws
from fxsplit.torch_internals.tensors.layouts import list_parts
from fxsplit.torch_internals.thread_modes import enter_saved_hooks
from fxsplit.torch_internals.words import is_refusal_of_hooks

JOINS = ("CatBackward0", "StackBackward0")
"""What autograd calls the backwards that return parts of a gradient."""

CUTS = ("detach_", "requires_grad_")
"""Methods that write to what autograd knows of a tensor, and not to its memory."""

KEPT = (
    "a backward runs through a tensor that was computed while a pipeline was compiled, and a hook (or an attribute "
    "of a module) has kept it: compile first, with example_inputs=, and then drop what hooks have kept so far"
)
"""What is said of a backward through an observed graph, which runs forward only."""

Visit = Callable[[fx.Node, Any, tuple[Any, ...], dict[str, Any]], None]
"""Called before a node runs, with (node, the callable behind it, its arguments, its keyword arguments)."""


class _BackwardInsideError(FxsplitError):
    """A node runs a backward while it is observed, as a module that computes forces does."""


@dataclass
class Observation:
    """What one node did.

    text: dtype and shape of the tensor it made, such as `float32[8, 64]`, or the name of another value's type.
    is_container: whether it made a container of tensors, such as the parts of a split.
    output_bytes, gradient_bytes: of its tensor, and of the gradient that returns for the tensor (0 where none does).
    kept_bytes: what autograd keeps of its memory for backward, parameters aside.
    written_bytes: of the model's buffers that it wrote.
    kept_for, kept_for_bytes: the part of that which only later nodes keep, and the first of these nodes.
    owners: the nodes whose memory its value lies in. `x.view(-1)` has the owners of `x`; a node that made new memory
        is its own owner.
    mutates: the owners of the memory that it wrote to in place.
    draws: whether it takes random numbers, now or in training mode. drew: whether it did now.
    storage_bytes: the memory of its tensors, weights aside. Views have that of the tensors that they look at.
    unkept_bytes: the part of that which autograd does not keep.
    is_turned: whether its tensor lies in memory in another order than that of its dimensions.
    is_read_turned: whether a node makes a view of its tensor in which the order is another one, as a transpose does.
        The gradient that comes back from there is in another order too.
    is_joined: whether its tensor was joined from several, as by a concatenation, whose backward returns parts of the
        gradient that it was given.
    is_read_joined: whether a node reads its tensor to join it with others: its gradient comes back as such a part.
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
    """Interprets a graph in the current grad mode, and fills `seen` with one Observation for each node.

    renamed: the device that the graph was captured on, and the one that it is to name in its place.
    """

    def __init__(
        self, gm: fx.GraphModule, visit: Visit | None = None, renamed: tuple[torch.device, torch.device] | None = None
    ) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.seen: dict[str, Observation] = {}
        self._visit = visit
        self._renamed = renamed
        # By the storage's number: which node made each, and those that autograd keeps already.
        self._owners: dict[int, str] = {}
        self._kept: set[int] = set()
        # By node, the storages of its value.
        self._made: dict[str, dict[int, UntypedStorage]] = {}
        self._nodes: list[fx.Node] = list(gm.graph.nodes)
        self._gm = gm
        self._alive: list[UntypedStorage] = []  # the number of a freed storage would be given to another one
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
        # Views and writes are told by memory: two values with one storage are in one memory.
        seen = _describe(value)
        written = [t for t, version in zip(tensors, before, strict=True) if t._version != version]
        # Batch norm's kernels write running statistics and count no version, so values are compared as well.
        changed = buffers.changed()
        seen.written_bytes = sum(t.nbytes for t in changed)
        # Those inside of a module are its own affair.
        written += [t for t in changed if any(t is given for given in tensors)]
        written += tensors[:1] if n.op == "call_method" and n.target in CUTS else []
        seen.mutates = tuple(dict.fromkeys(self._owners.get(get_storage_id(t), n.name) for t in written))
        # A weight that is fetched draws nothing: if a generator moved, another thread drew.
        # A dropout in evaluation draws nothing now, and will once the same graph serves training.
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
        """Return the tensors that calls have made: a hook may let one want a gradient, which nobody collects."""
        values = (self.env.get(node) for node in self._nodes if node.op.startswith("call"))
        return [t for value in values for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]

    def note_unkept(self) -> None:
        """Note what of each node's memory autograd does not keep; a later node may be the one that keeps it."""
        there = self._kept | self._weights
        for name, storages in self._made.items():
            self.seen[name].storage_bytes = sum(s.nbytes() for key, s in storages.items() if key not in self._weights)
            self.seen[name].unkept_bytes = sum(s.nbytes() for key, s in storages.items() if key not in there)

    def note_layouts(self) -> None:
        """Note which gradients arrive in another order of memory than their tensors have, or in a larger one's."""
        # From the last node on, since a gradient that is turned stays so in nodes that hand it on, or that compute
        # element by element. Operators with weights make a new one.
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
        """Return a node's value, and the storages that autograd saves for the node's backward."""
        saved: list[UntypedStorage] = []

        def keep(tensor: Tensor) -> None:
            saved.extend(part.untyped_storage() for part in list_parts(tensor))

        def refuse_backward(_: object) -> Tensor:
            raise _BackwardInsideError(KEPT) if running else FxsplitError(KEPT)

        running = True
        # The hook hands nothing on to autograd: a graph that holds `saved` would keep itself alive for ever.
        try:
            with enter_saved_hooks(keep, refuse_backward):
                return super().run_node(n), saved
        except _BackwardInsideError:
            saved.clear()  # the node takes gradients by itself, of which the hook knows nothing
        except RuntimeError as error:
            if not is_refusal_of_hooks(error):
                raise
        finally:
            running = False
        # torch.func refuses such hooks: of what it saves, the tensors that the node reads are all that is known.
        return super().run_node(n), [part.untyped_storage() for t in tensors for part in list_parts(t)]

    def _charge(self, n: fx.Node, saved: list[UntypedStorage]) -> None:
        """Charge each newly kept storage to the node whose value it is, or to `n` where it is internal to `n`."""
        for storage in saved:
            key = int(storage._cdata)
            # Weights are in memory anyway, and a storage that two backwards keep is there once.
            if key in self._weights or key in self._kept:
                continue
            self._kept.add(key)
            self._alive.append(storage)
            name = self._owners.get(key, n.name)
            owner = self.seen.get(name)
            if owner is None:
                continue
            owner.kept_bytes += storage.nbytes()
            # Of several later nodes the first one runs backward last.
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
    """Return what each node of `gm` does with copies of `tensors`, by the node's name, in grad mode.

    visit: called before each call node runs. from_shapes: nothing is computed, and what a node would do is told from
        the shapes of its weights and of `tensors`.
    device: with `from_shapes`, where the weights and `tensors` are taken to be; it need not exist.

    Buffers, random generators and gradients are afterwards as they were. Raises TraceError for a graph that trains a
    tensor which is no parameter.
    """
    renamed = None if device is None else (tensors[0].device, device)
    with make_runnable(gm, tensors, from_shapes, device) as (own, given), preserve(own), torch.enable_grad():
        observer = ObservingInterpreter(own, visit, renamed)
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in given]
        # The graph gets clones, because autograd refuses to write in place to a leaf.
        result = observer.run(*(leaf.clone() for leaf in leaves))
        observer.note_unkept()
        observer.note_layouts()
        # A tensor from a closure would be trained by the model and by no stage.
        known = {id(t) for t in (*own.parameters(), *own.buffers(), *leaves, *observer.list_made())}
        foreign = [leaf for leaf in _list_leaves(result) if id(leaf) not in known]
        if foreign:
            # One that the model makes in each call, to take a gradient by it inside, is another one in another call.
            again = fx.Interpreter(own).run(*(leaf.clone() for leaf in leaves))
            held = {id(leaf) for leaf in _list_leaves(again)}
            foreign = [leaf for leaf in foreign if id(leaf) in held]
    if foreign:
        raise TraceError(
            f"the model trains a tensor ({describe_tensor(foreign[0])}) that is none of its parameters, so no stage "
            "would own it: make it a parameter of the model, or give it as an argument to a function marked with "
            "torch.fx.wrap"
        )
    return observer.seen


def _list_leaves(result: Any) -> list[Tensor]:
    """Return the leaves of autograd's graph that the tensors of a result depend on."""
    return [leaf for t in pytree.tree_leaves(result) if isinstance(t, Tensor) for leaf in find_leaves(t)]


def _is_joined(value: Tensor) -> bool:
    """Return whether autograd knows a tensor as one that was joined from several."""
    return value.grad_fn is not None and value.grad_fn.name() in JOINS


def _has_weights(gm: nn.Module, node: fx.Node) -> bool:
    """Return whether a node computes with parameters: those of its module, or one that it reads."""
    if node.op == "call_module" and any(True for _ in gm.get_submodule(str(node.target)).parameters()):
        return True
    fetched = (find_target(gm, i) for i in node.all_input_nodes if i.op == "get_attr")
    return any(isinstance(target, nn.Parameter) for target in fetched)


def _describe(value: Any) -> Observation:
    """Return what can be said of a value by itself: its text, whether it is a container, and its bytes."""
    if isinstance(value, Tensor):
        size = value.numel() * value.element_size()
        turned = value.layout is torch.strided and not value.is_contiguous()
        text, gradient = describe_tensor(value), size if value.requires_grad else 0
        return Observation(text, False, size, gradient, is_turned=turned, is_joined=_is_joined(value))
    leaves = pytree.tree_leaves(value)
    return Observation(type(value).__name__, is_container=any(isinstance(leaf, Tensor) for leaf in leaves))
