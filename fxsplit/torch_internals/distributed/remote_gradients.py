"""Gradients of a model with parameters on several ranks: shown to every rank, hidden from optimizers.

After a step every parameter has a `.grad` on every rank. The rank that owns the parameter has the values; the other
ranks have a remote tensor:

              rank 0           rank 1
    a.grad    values           remote, rank 0
    b.grad    remote, rank 1   values

So a loop over the parameters that computes norms (clip_grad_norm_) or checks for finite numbers (GradScaler) runs the
same operators on all ranks. When the ranks reach such an operator, they exchange their numbers and all get the same
result.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.utils import _foreach_utils as foreach
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxsplit.errors import InputError, RanksDiffer
from fxsplit.torch_internals.distributed.optimizer_hooks import hide_gradients_from_optimizers
from fxsplit.torch_internals.distributed.optimizer_loads import note_names
from fxsplit.torch_internals.distributed.remote_parameters import RemoteParameter, send_away
from fxsplit.torch_internals.distributed.remote_tensors import TOGETHER, Owner, RemoteTensor, is_remote, make_remote
from fxsplit.torch_internals.thread_modes import enter_dispatch_mode

aten = torch.ops.aten
NORMS = aten._foreach_norm.Scalar
NORM = aten.linalg_vector_norm.default
UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default
NORM_FUNCTIONS = {
    *(torch.linalg.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm, torch.norm, Tensor.norm),
    *(torch.frobenius_norm, torch.nuclear_norm),
}
"""torch's norm functions. Vector norms over all elements use an operator of `TOGETHER`; other norms do not."""
KEEPING = {Tensor.detach, Tensor.data.__get__, Tensor._values}  # type: ignore[attr-defined]
"""Functions whose result is the same gradient, so that the result keeps its class."""


class AllGather(Protocol):
    """Exchanges numbers between all ranks."""

    def gather(self, numbers: Tensor, what: str) -> list[Tensor]:
        """Return the numbers of each rank, in order of the ranks. `what` names the reason for the call."""


class OwnGradient(Tensor):
    """A gradient of this rank, in place of which the other ranks have a remote tensor. Its memory is ordinary.

    place: the object that knows the gradients of all ranks, and the index of the parameter.
    """

    place: tuple[RemoteGradients, int]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function.

        For norms and the like, all ranks run it together: the others call it with remote gradients.
        """
        kwargs = kwargs or {}
        # Reading an attribute, such as the shape, runs no operator.
        if func in KEEPING or getattr(func, "__name__", "") == "__get__":
            with torch._C.DisableTorchFunctionSubclass():
                found = func(*args, **kwargs)
            if func in KEEPING and isinstance(found, Tensor):
                mark_own(found, *args[0].place)
            return found
        if func in NORM_FUNCTIONS and any(map(_is_own_sparse, pytree.tree_leaves((args, kwargs)))):
            # torch uses other operators for sparse gradients. The other ranks have dense ones, so run the operators for
            # dense gradients.
            args, kwargs = pytree.tree_map_only(OwnGradient, _stand_in, (tuple(args), kwargs))
            return func(*args, **kwargs)
        together = _Together()  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunctionSubclass(), enter_dispatch_mode(together):
            found = func(*args, **kwargs)
        if func in NORM_FUNCTIONS and not together.has_met:
            name = getattr(func, "__name__", "norm")
            own = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, OwnGradient))
            given = ", ".join([*map(repr, args[1:]), *(f"{k}={v!r}" for k, v in kwargs.items() if v is not own)])
            _refuse_norm(*own.place, f"{name}() with {given or 'defaults'}")
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle, copy and save as a plain tensor."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a plain tensor: no other rank knows the gradient of a copy of the model."""
        made = memo[id(self)] = self.as_subclass(Tensor).detach().clone()
        return made


class _Together(TorchDispatchMode):
    """Lets all ranks run operators of TOGETHER on this rank's gradients at the same time.

    The other ranks run the same torch code, so they reach the same operator.
    has_met: whether such an operator has run.
    """

    has_met = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        kwargs = kwargs or {}
        if func in TOGETHER:
            own = next((g for g in pytree.tree_leaves((args, kwargs)) if isinstance(g, OwnGradient)), None)
            if own is not None:
                self.has_met = True
                return own.place[0].run_together(func, args, kwargs)
        return func(*args, **kwargs)


def _is_own_sparse(value: Any) -> bool:
    """Return whether a value is a sparse gradient of this rank."""
    return isinstance(value, OwnGradient) and value.layout is torch.sparse_coo


def _stand_in(gradient: OwnGradient) -> Tensor:
    """Return the remote tensor that other ranks have in place of a sparse gradient.

    Return a dense gradient as it is.
    """
    remote_gradients, index = gradient.place
    return remote_gradients.make_stand_in(gradient, index) if _is_own_sparse(gradient) else gradient


def _refuse_norm(remote_gradients: RemoteGradients, index: int, what: str) -> NoReturn:
    """Raise InputError for a norm that ranks do not compute together.

    index: the index of the parameter.
    """
    raise InputError(
        f"{what} of the gradient of {remote_gradients.get_name(index)!r}, which only one rank has: all ranks can "
        "compute vector norms over all elements only, such as .grad.norm(). Compute any other norm on its own rank, "
        "from p.grad.clone() for p in pipe.local_parameters()"
    )


def mark_own(gradient: Tensor, remote_gradients: RemoteGradients, index: int) -> None:
    """Mark a gradient of this rank as the gradient of the parameter with this index, which all ranks know."""
    if type(gradient) is Tensor:
        gradient.__class__ = OwnGradient
    if isinstance(gradient, OwnGradient):
        gradient.place = remote_gradients, index


@dataclass(frozen=True)
class OwnedParameter:
    """A parameter of the model, and the rank that owns it."""

    name: str
    weight: weakref.ref[Tensor]
    rank: int


class RemoteGradients:
    """The gradients of a model's parameters over all ranks.

    named: the name, the parameter and its rank, for all parameters in an order that all ranks share.
    exchange: exchanges numbers between ranks.
    me: this rank.
    alone: whether there is only one rank, so that gradients stay plain tensors.
    """

    def __init__(
        self, named: Sequence[tuple[str, Tensor, int]], exchange: AllGather, me: int, *, alone: bool = False
    ) -> None:
        self._alone = alone
        self._entries = [OwnedParameter(name, weakref.ref(weight), rank) for name, weight, rank in named]
        self._exchange = exchange
        self._me = me
        hide_gradients_from_optimizers(OwnGradient)
        note_names((name, weight) for name, weight, _ in named)
        _let_clipping_take_lists()

    def knows(self, named: Sequence[tuple[str, Tensor, int]]) -> bool:
        """Return whether these are exactly the parameters and ranks that this object knows."""
        known = [(entry.name, entry.weight(), entry.rank) for entry in self._entries]
        return len(known) == len(named) and all(
            a[0] == b[0] and a[1] is b[1] and a[2] == b[2] for a, b in zip(known, named, strict=True)
        )

    def get_name(self, index: int) -> str:
        """Return the name of a parameter, by its index."""
        return self._entries[index].name

    def send_away(self, index: int, device: torch.device | None = None) -> None:
        """Free the values of a parameter that another rank owns, and make it a remote tensor.

        device: the device that the parameter reports afterwards (default: its present device).
        """
        entry = self._entries[index]
        weight = entry.weight()
        assert weight is not None, "a pipeline keeps its parameters"
        send_away(weight, Owner(entry.name, entry.rank, index, self), device)

    def list_present(self, coming: Collection[Tensor] = ()) -> list[float]:
        """Return 1.0 for each parameter of this rank with a gradient, and 0.0 for every other parameter.

        coming: parameters of this rank that are about to get a gradient.
        """
        soon = set(map(id, coming))
        return [float(self._get_own(e) is not None or id(e.weight()) in soon) for e in self._entries]

    def share_present(self, found: Sequence[Sequence[float]] | None = None) -> None:
        """Give each parameter a gradient on every rank if its owner has one, else None. This rank's own gradients stay.

        found: the result of `list_present` on each rank, if it is known already.
        """
        if found is None:
            mine = torch.tensor(self.list_present(), dtype=torch.float64)
            found = [one.tolist() for one in self._exchange.gather(mine, "the end of a backward")]
        for index, entry in enumerate(self._entries):
            weight = entry.weight()
            # Runs at every step, so assign only if something changes.
            if isinstance(weight, RemoteParameter):
                there = found[entry.rank][index] > 0
                weight.grad = self._make_gradient(weight, index) if there else None
            elif weight is not None and weight.grad is not None and not self._alone:
                mark_own(weight.grad, self, index)

    def _make_gradient(self, weight: RemoteParameter, index: int) -> Tensor:
        """Return the remote gradient of a parameter."""
        # A remote gradient of another pipeline on the same model would exchange numbers with that pipeline's ranks.
        if isinstance(weight.grad, RemoteTensor) and weight.grad.owner.collective is self:
            return weight.grad
        return make_remote(RemoteTensor, weight, replace(weight.owner, gradient=True, index=index, collective=self))

    def make_stand_in(self, gradient: Tensor, index: int) -> Tensor:
        """Return the remote tensor that other ranks have in place of the gradient of a parameter."""
        entry = self._entries[index]
        return make_remote(RemoteTensor, gradient, Owner(entry.name, entry.rank, index, self, gradient=True))

    def _get_own(self, entry: OwnedParameter) -> Tensor | None:
        """Return the gradient of a parameter of this rank, or None."""
        weight = entry.weight()
        return None if entry.rank != self._me or weight is None or is_remote(weight) else weight.grad

    # Operators that ranks run together

    def run_together(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator of TOGETHER on gradients of all ranks. All ranks call this at the same time."""
        if func is UNSCALE:
            return self._unscale(*args, **kwargs)
        return self._find_all_norms(*args, **kwargs) if func is NORMS else self._find_one_norm(*args, **kwargs)

    def _unscale(self, gradients: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
        """Unscale gradients in place, and set `found_inf` to 1 if a gradient on any rank is not finite."""
        own = [gradient for gradient in gradients if not is_remote(gradient)]
        if own:
            with torch._C.DisableTorchFunctionSubclass():
                torch._amp_foreach_non_finite_check_and_unscale_(own, found_inf, inv_scale)
        # Gather even if this rank has no gradients, since the other ranks wait for it.
        found = self._gather([float(found_inf)], "unscaled gradients")
        found_inf.fill_(max(numbers[0] for numbers in found))

    def _find_all_norms(
        self, given: Sequence[Tensor], ord: Any = 2, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        """Return the norm of each gradient. Raises torch's own errors for the arguments."""
        for gradient in given:
            _try_norm(gradient, ord, dtype=dtype)
        # Exchange all norms: torch groups gradients by dtype, and the order of groups may differ between ranks.
        norms = self._exchange_norms(range(len(self._entries)), float(ord), dtype, f"norms of order {float(ord)}")
        return tuple(self._find_norm(gradient, norms, float(ord), dtype) for gradient in given)

    def _find_one_norm(
        self, gradient: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return the norm of one gradient, as torch.linalg.vector_norm does.

        Raises InputError for a norm over some of the dimensions, and torch's own errors for the arguments.
        """
        index = self._find_index(gradient)
        assert index is not None, "the gradient is one of these parameters"
        _try_norm(gradient, ord, dim, keepdim, dtype=dtype)
        dims = range(gradient.ndim) if dim in (None, [], ()) else [dim] if isinstance(dim, int) else dim
        if {d % max(gradient.ndim, 1) for d in dims} != set(range(gradient.ndim)):
            _refuse_norm(self, index, f"a norm of order {ord!r} over dimensions {list(dims)}")
        order = float(ord)
        norms = self._exchange_norms(
            [index], order, dtype, f"the norm of order {order} of the gradient of {self.get_name(index)!r}"
        )
        found = self._find_norm(gradient, norms, order, dtype)
        return found.reshape([1] * gradient.ndim) if keepdim else found

    def _exchange_norms(
        self, chosen: Sequence[int], ord: float, dtype: torch.dtype | None, what: str
    ) -> list[list[float]]:
        """Return a list of norms for each rank: one norm for each parameter, 0 if the rank has no gradient of it.

        chosen: the numbers of the parameters with norms to compute; all other norms are 0. what: the user's call, for
            errors.
        """
        own = {i: gradient for i in chosen if (gradient := self._get_own(self._entries[i])) is not None}
        numbers = [0.0] * len(self._entries)
        if own:
            dense = [g.coalesce().values() if g.is_sparse else g for g in own.values()]
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                norms = torch._foreach_norm(dense, ord, dtype)
                # One transfer to the host for all norms.
                found = torch.stack([norm.double() for norm in norms]).tolist()
            for i, number in zip(own, found, strict=True):
                numbers[i] = number
        return self._gather(numbers, what)

    def _find_norm(self, gradient: Tensor, norms: list[list[float]], ord: float, dtype: torch.dtype | None) -> Tensor:
        """Return the norm of a gradient.

        If it belongs to one of the parameters, take it from `norms`, those of all ranks.
        Compute the norm of any other gradient here.
        """
        index = self._find_index(gradient)
        if index is None:
            with torch._C.DisableTorchFunctionSubclass():
                own: Tensor = torch.linalg.vector_norm(gradient, ord, dtype=dtype)
                return own
        kind = dtype or gradient.dtype.to_real()
        return torch.tensor(norms[self._entries[index].rank][index], dtype=kind, device=gradient.device)

    def _find_index(self, gradient: Tensor) -> int | None:
        """Return the index of the parameter that a gradient belongs to, or None if it belongs to none of these."""
        if isinstance(gradient, RemoteTensor):
            return gradient.owner.index if gradient.owner.collective is self else None
        if isinstance(gradient, OwnGradient):
            remote_gradients, index = gradient.place
            return index if remote_gradients is self else None
        return None

    def _gather(self, numbers: Sequence[float], what: str) -> list[list[float]]:
        """Exchange numbers between all ranks. `what`: the reason.

        Raises RanksDiffer if a rank calls it for another reason.
        """
        mark = float(zlib.crc32(what.encode()))
        # Always the same size, so that ranks that call for different reasons find out instead of blocking.
        mine = torch.zeros(2 + len(self._entries), dtype=torch.float64)
        mine[: 1 + len(numbers)] = torch.tensor([mark, *numbers], dtype=torch.float64)
        found = [one.tolist() for one in self._exchange.gather(mine, what)]
        other = next((rank for rank, one in enumerate(found) if one[0] != mark), None)
        if other is not None:
            raise RanksDiffer(
                f"rank {self._me} computes {what}, and rank {other} something else: clip, unscale and read the same "
                "gradients on every rank, in the same order"
            )
        return [one[1:] for one in found]


def _try_norm(gradient: Tensor, *args: Any, dtype: torch.dtype | None) -> None:
    """Raise torch's errors for wrong arguments of a norm, on every rank, before the ranks wait for each other."""
    bare = torch.empty(gradient.shape, dtype=gradient.dtype, device="meta")
    with torch._C.DisableTorchFunctionSubclass():
        torch.linalg.vector_norm(bare, *args, dtype=dtype)


class _EndCallback:
    """A callback for the end of a backward.

    If autograd drops it uncalled, the backward has failed: calls `otherwise`.
    """

    def __init__(self, function: Callable[[], None], otherwise: Callable[[], None]) -> None:
        self._function = function
        self._otherwise: Callable[[], None] | None = otherwise

    def __call__(self) -> None:
        self._otherwise = None
        self._function()

    def __del__(self) -> None:
        if self._otherwise is not None:
            self._otherwise()


def call_after_backward(function: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """Call a function once the running backward has accumulated all gradients, or `otherwise` if the backward fails."""
    torch.autograd.Variable._execution_engine.queue_callback(_EndCallback(function, otherwise))


@cache
def _let_clipping_take_lists() -> None:
    """Let torch's gradient clipping compute the norms of a whole list of gradients at once, and not one by one."""
    # torch's own DTensor does the same.
    foreach._foreach_supported_types += [OwnGradient, RemoteTensor]
