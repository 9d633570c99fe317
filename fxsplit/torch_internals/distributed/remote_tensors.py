"""Remote tensors: tensors whose values are on another rank. They have a shape, a dtype and a device, but no memory.

Operators on remote tensors compute shapes only. A result computed from a remote tensor is remote too. A write to a
remote tensor does nothing here, since the rank that owns the values runs the same write. An operator that would read
values, or mix them with values of this rank, raises an error that names the weight:

    remote * 2               -> remote
    remote.mul_(2)           -> the same remote tensor; only its owner computes
    remote + tensor of rank  -> ElsewhereError
    remote.item()            -> ElsewhereError
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup
from torch.utils import _pytree as pytree

from fxsplit.errors import ElsewhereError
from fxsplit.torch_internals.scopes.undo import call_all
from fxsplit.torch_internals.thread_modes import leave_inference_mode

T = TypeVar("T", bound=Tensor)
LOCAL = "pipe.local_parameters() are those of this rank, and the ranks with the same ones are mesh.get_group('dp')"
"""The advice in the error for a user's own collective on a remote tensor."""
aten = torch.ops.aten

SAME = {aten.detach.default, aten.alias.default}
"""Operators that return the same tensor, so that the result still counts as the gradient itself."""
TOGETHER = {
    aten._foreach_norm.Scalar,
    aten.linalg_vector_norm.default,
    aten._amp_foreach_non_finite_check_and_unscale_.default,
}
"""Operators on gradients that all ranks run together, since all need the results; see `remote_gradients.py`."""
DRAW_BY_VALUES = {"multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet"}
"""Operators that draw a number of random numbers that depends on values."""


class CollectiveOperators(Protocol):
    """Runs operators of `TOGETHER`, such as norms of gradients, on all ranks at the same time."""

    def run_together(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the operator `func` with these arguments on the gradients of all ranks, and return its result.

        All ranks call this at the same time, since each rank has the values of only some gradients.
        """


@dataclass(frozen=True, eq=False)
class Owner:
    """Where the values of a remote tensor are: the rank that has them, and the name of the weight in the model.

    index: the index of the weight among the parameters that `collective` knows.
    collective: for a gradient, the object that runs operators on the gradients of all ranks; None for a weight.
    """

    name: str
    rank: int
    index: int = 0
    collective: CollectiveOperators | None = None
    gradient: bool = False
    """Whether this is the weight's gradient instead of its values."""
    derived: bool = False
    """Whether the tensor was computed from the weight or the gradient, and is neither of them itself."""
    absent: frozenset[int] = frozenset()
    """The ranks of torch's default group that do not have the values, including this rank."""

    def __str__(self) -> str:
        return f"the gradient of {self.name!r}" if self.gradient else repr(self.name)

    def refuse(self, what: str, way: str = "") -> NoReturn:
        """Raise ElsewhereError for an operation that needs the values.

        what: names the operation. way: the alternative that the error suggests.
        """
        if not way:
            way = (
                "all ranks can compute norms only, by clip_grad_norm_() and .grad.norm(); compute anything else on "
                "its own rank, from p.grad for p in pipe.local_parameters(), and combine them by torch.distributed"
                if self.gradient
                else "pipe.state_dict() gathers all weights"
            )
        raise ElsewhereError(f"{self} is on rank {self.rank}, and {what} needs its values on this rank: {way}")


class RemoteStorage(torch.UntypedStorage):
    """The storage of a remote tensor: it has a size, but no memory."""

    owner: Owner

    def data_ptr(self) -> NoReturn:
        """Raise ElsewhereError: libraries such as safetensors read a tensor through its storage."""
        self.owner.refuse("to read its storage")

    def __getitem__(self, *args: Any) -> NoReturn:
        """Raise ElsewhereError."""
        self.owner.refuse("to read its storage")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise ElsewhereError."""
        self.owner.refuse("to save or pickle it")

    def clone(self) -> NoReturn:
        """Raise ElsewhereError."""
        self.owner.refuse("to copy its storage")


class RemoteTensor(Tensor):
    """A tensor whose values are on another rank. `owner` says on which."""

    owner: Owner
    lent: Tensor | None = None
    """The values in host memory, which the owner lends while all ranks compile together (None: not lent)."""
    # Operators go to __torch_dispatch__ only, including those that torch calls internally.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on shapes only. Raises ElsewhereError if it needs values."""
        return run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return dtype, shape and owner."""
        # A tensor under construction has no owner yet.
        where = f", {self.owner} on rank {self.owner.rank}" if "owner" in self.__dict__ else ""
        return f"{type(self).__name__}({self.dtype}, {list(self.shape)}{where})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise ElsewhereError: there are no values to pickle."""
        self.owner.refuse("to save or pickle it")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy with the same owner, for a copy of the model."""
        made = make_remote(type(self), self, self.owner, requires_grad=self.requires_grad)
        memo[id(self)] = made
        made.__dict__.update(self.__dict__)
        return made

    @property
    def data(self) -> Tensor:
        """The tensor, detached from autograd."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        # The owner takes the values. Here only dtype, shape and device may change, as by model.half().
        if (value.dtype, value.shape, value.device) == (self.dtype, self.shape, self.device):
            return
        gradient = self.grad
        exchange(self, make_remote(type(self), value, self.owner, requires_grad=self.requires_grad))
        if isinstance(gradient, RemoteTensor):
            self.grad = make_remote(RemoteTensor, value, gradient.owner)

    def data_ptr(self) -> int:
        """Return 0, as for a tensor without values."""
        return 0

    def untyped_storage(self) -> RemoteStorage:
        """Return the tensor's storage, which raises ElsewhereError on access to its memory."""
        found: Any = super().untyped_storage()
        # Change the class in place: other code may read the size and identity of the storage.
        found.__class__, found.owner = RemoteStorage, self.owner
        return cast(RemoteStorage, found)

    def storage(self) -> NoReturn:
        """Raise ElsewhereError."""
        self.owner.refuse("to read its storage")

    def __dlpack__(self, **kwargs: Any) -> NoReturn:
        """Raise ElsewhereError: other libraries would read memory that does not belong to the tensor."""
        self.owner.refuse("to hand its memory on")

    def tolist(self) -> NoReturn:
        """Raise ElsewhereError."""
        self.owner.refuse("tolist()")

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Raise ElsewhereError."""
        self.owner.refuse("numpy()")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ElsewhereError."""
        self.owner.refuse("to make an array of it")


def is_remote(tensor: object) -> bool:
    """Return whether a tensor's values are on another rank."""
    return isinstance(tensor, RemoteTensor)


def make_remote(
    kind: type[T], like: Tensor, owner: Owner, *, requires_grad: bool = False, device: torch.device | None = None
) -> T:
    """Return a remote tensor of class `kind` with the shape, strides and dtype of `like`.

    device: the device that it reports, by default that of `like`.
    """
    strides = like.stride() if like.layout == torch.strided else None
    # Outside of inference mode, in which tensors have no version counter.
    with leave_inference_mode():
        made: Any = torch.Tensor._make_wrapper_subclass(
            kind, like.shape, strides, dtype=like.dtype, device=device or like.device, requires_grad=requires_grad
        )
    made.owner = owner
    return cast(T, made)


def exchange(tensor: Tensor, made: Tensor) -> None:
    """Swap the class and the C++ tensor of two tensors, and give `tensor` the attributes of both.

    Both Python objects stay, so that everything that refers to `tensor` refers to the new contents.
    """
    new: Any = type(made)
    old: Any = type(tensor)
    # Like torch.utils.swap_tensors, but it allows weak references, which keep referring to `tensor`. From C, so that an
    # interrupt comes before or after all of it.
    call_all(
        [
            partial(setattr, tensor, "__class__", new),
            partial(setattr, made, "__class__", old),
            partial(torch._C._swap_tensor_impl, tensor, made),
            partial(tensor.__dict__.update, made.__dict__),
        ]
    )


def _is_gradient(tensor: RemoteTensor) -> bool:
    """Return whether a tensor is the gradient of a parameter itself, so that ranks can exchange its norms."""
    return tensor.owner.gradient and not tensor.owner.derived and tensor.owner.collective is not None


def _get_collective(gradient: RemoteTensor) -> CollectiveOperators:
    """Return the object through which all ranks run operators on a gradient together."""
    assert gradient.owner.collective is not None, "gradients have one"
    return gradient.owner.collective


def run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator with remote tensors among its arguments. Raises ElsewhereError if it needs values."""
    found = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_remote(leaf)]
    if func in TOGETHER and all(map(_is_gradient, found)):
        return _get_collective(found[0]).run_together(func, args, kwargs)
    name = func._schema.name.removeprefix("aten::")
    if name == "c10d::broadcast_":
        return _broadcast(func, args, kwargs, found)
    if name.startswith("c10d::"):
        found[0].owner.refuse(f"{name.removeprefix('c10d::')}() among ranks", LOCAL)
    if name.startswith(("_foreach_", "_fused_")):
        return _run_each(func, args, kwargs, name)
    return _run_one(func, args, kwargs, name, found)


def _broadcast(func: Any, args: Sequence[Any], kwargs: dict[str, Any], found: Sequence[RemoteTensor]) -> Any:
    """Take part in a broadcast among ranks that do not have the values.

    Optimizers that shard their steps make such calls.
    A single number is sent instead of the values: each rank must still take part in the same collectives.
    """
    ranks = dist.get_process_group_ranks(ProcessGroup.unbox(args[1]))
    for one in found:
        if not one.owner.absent.issuperset(ranks):
            one.owner.refuse(f"broadcast() among ranks {ranks}", LOCAL)
    tensors = [torch.zeros(1, dtype=t.dtype, device=t.device) if is_remote(t) else t for t in args[0]]
    _, work = func(tensors, *args[1:], **kwargs)
    return list(args[0]), work


def _run_one(func: Any, args: Sequence[Any], kwargs: dict[str, Any], name: str, found: Sequence[RemoteTensor]) -> Any:
    """Run one operator, which is not on lists of tensors. `found`: the remote tensors among its arguments."""
    owner = found[0].owner
    other = next((one.owner for one in found if one.owner.rank != owner.rank), None)
    if other is not None:
        owner.refuse(f"{name}() with {other} of rank {other.rank}")
    if torch.Tag.nondeterministic_seeded in func.tags:
        _draw(func, args, kwargs, owner, name)
    written = _list_written(func, args, kwargs)
    if written:
        if not all(map(is_remote, written)):
            owner.refuse(f"{name}() into a tensor of this rank")
        # The owner writes.
        return written[0] if len(func._schema.returns) == 1 else tuple(written) if func._schema.returns else None
    shapes = {tuple(one.shape) for one in found}
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and not is_remote(leaf) and leaf.ndim and tuple(leaf.shape) not in shapes:
            owner.refuse(f"{name}()")
    label = kwargs.get("device") or found[0].device
    made = _compute_shapes(func, args, kwargs, owner, name)
    least = min(one.numel() for one in found)
    is_view = any(a.alias_info is not None for a in func._schema.arguments)
    for tensor in pytree.tree_leaves(made):
        if not isinstance(tensor, Tensor) or (tensor.numel() < least and not is_view):
            owner.refuse(f"{name}()")
    kept = owner if func in SAME else replace(owner, derived=True)
    return pytree.tree_map_only(Tensor, lambda t: make_remote(RemoteTensor, t, kept, device=torch.device(label)), made)


def _draw(func: Any, args: Sequence[Any], kwargs: dict[str, Any], owner: Owner, name: str) -> None:
    """Draw as many random numbers as the weight's owner does, and drop them, so that all ranks' generators stay equal.

    Otherwise, ranks that re-initialise a model would give layers on two ranks the same numbers.
    """
    if name in DRAW_BY_VALUES:
        owner.refuse(f"{name}()")

    def fill(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device).zero_()
        return leaf

    bare, named = pytree.tree_map(fill, (tuple(args), dict(kwargs)))
    func(*bare, **named)


def _compute_shapes(func: Any, args: Sequence[Any], kwargs: dict[str, Any], owner: Owner, name: str) -> Any:
    """Return an operator's result on meta tensors."""

    def strip(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    bare, named = pytree.tree_map(strip, (tuple(args), dict(kwargs)))
    try:
        return func(*bare, **named)
    except (RuntimeError, NotImplementedError) as error:  # an operator that reads values cannot run without them
        try:
            owner.refuse(f"{name}()")
        except ElsewhereError as refused:
            raise refused from error


def _list_written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments to which the operator writes."""
    found: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def _run_each(func: Any, args: Sequence[Any], kwargs: dict[str, Any], name: str) -> Any:
    """Run an operator on lists of tensors element by element. Remote elements are left to their owners."""
    n = len(args[0])

    def is_list(value: Any) -> bool:
        return isinstance(value, (list, tuple)) and len(value) == n

    def choose(value: Any, places: Sequence[int]) -> Any:
        return [value[i] for i in places] if is_list(value) else value

    def run_at(places: Sequence[int]) -> Any:
        return func(*(choose(a, places) for a in args), **{k: choose(v, places) for k, v in kwargs.items()})

    remote = [i for i in range(n) if is_remote(args[0][i])]
    local = [i for i in range(n) if not is_remote(args[0][i])]
    for i, leaf in _list_leaves(local, [*args, *kwargs.values()], is_list):
        if is_remote(leaf):
            leaf.owner.refuse(f"{name}() with place {i}, which is of this rank,")
    writes = bool(_list_written(func, args, kwargs))
    found: dict[int, Any] = dict(zip(local, (run_at(local) if local else None) or [], strict=False))
    if writes:
        return args[0] if func._schema.returns else None
    if name.endswith(("norm", "max")):
        args[0][remote[0]].owner.refuse(f"{name}()")
    for i in remote:
        found[i] = make_remote(RemoteTensor, args[0][i], replace(args[0][i].owner, derived=True))
    return [found[i] for i in range(n)]


def _list_leaves(
    places: Sequence[int], values: Sequence[Any], is_list: Callable[[Any], bool]
) -> Iterator[tuple[int, Any]]:
    """Yield (position, element) for the elements at these positions of each value that is a list."""
    for value in values:
        if is_list(value):
            yield from ((i, value[i]) for i in places)
