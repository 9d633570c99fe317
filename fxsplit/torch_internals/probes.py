"""Check how torch behaves, on small tensors at a process's first capture. A torch that behaves differently is refused.

A private name may mean something else in a new release. Without these checks, the result would be wrong gradients
without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxsplit.torch_internals.autograd.leaves import find_leaves, mute
from fxsplit.torch_internals.autograd.split import collect_weight_backwards, find_branch_nodes
from fxsplit.torch_internals.autograd.sums import differentiate, find_unshared
from fxsplit.torch_internals.fx.interpret import count_writes, get_storage_id
from fxsplit.torch_internals.needs import refuse
from fxsplit.torch_internals.scopes.modes import Modes, read_hooks
from fxsplit.torch_internals.scopes.patch import find_owner_of_apply, patch_method
from fxsplit.torch_internals.thread_modes import enter_dispatch_mode, enter_saved_hooks
from fxsplit.torch_internals.words import learn_words


def _make_leaf() -> Tensor:
    """Return a leaf of four ones, independent of the default device and dtype."""
    return torch.ones(2, 2, dtype=torch.float64, device="cpu", requires_grad=True)


def _returns_gradients() -> bool:
    """Check that the engine returns gradients, and does not write them to `.grad`."""
    leaf = _make_leaf()
    (found,) = differentiate([leaf * 3], [torch.ones_like(leaf)], [leaf])
    return found is not None and bool((found == 3).all()) and leaf.grad is None


def _mutes_hooks() -> bool:
    """Check that autograd takes hooks before and after `.grad` from the dictionaries in which `mute` hides them."""
    leaf, calls = _make_leaf(), []
    leaf.register_hook(lambda _: calls.append("before"))
    leaf.register_post_accumulate_grad_hook(lambda _: calls.append("after"))
    with mute([leaf]):
        leaf.sum().backward()
        muted = not calls
    leaf.sum().backward()
    return muted and calls == ["before", "after"]


def _shows_shared_gradients() -> bool:
    """Check that gradients that two leaves share, and expanded gradients, do not count as unshared memory."""
    a, b = _make_leaf(), _make_leaf()
    same = differentiate([a + b], [torch.ones_like(a)], [a, b])
    expanded = differentiate([a.sum()], [torch.ones_like(a.sum())], [a])
    return not any((*find_unshared(same), *find_unshared(expanded)))


def _shows_shared_memory() -> bool:
    """Check that views share a storage id, that clones do not, and that writes through a view are counted."""
    a = _make_leaf().detach()
    view, clone, before = a.view(-1), a.clone(), count_writes(a)
    view.add_(1)
    return get_storage_id(view) == get_storage_id(a) != get_storage_id(clone) and count_writes(a) != before


def _finds_nodes() -> bool:
    """Check that autograd's nodes lead to leaves, and that weight gradients can be a second half."""
    weight, bias, x = _make_leaf(), _make_leaf()[0].detach().requires_grad_(), _make_leaf()
    out = torch.nn.functional.linear(x.exp(), weight, bias).exp()
    leaves = {id(leaf) for leaf in find_leaves(out)}
    nodes, without = find_branch_nodes([out], [weight, bias], small_too=True)
    edges = [edge for branch in nodes.values() for edge in branch.edges]
    given = torch.ones_like(out)
    *arrived, of_weight, of_bias = differentiate([out], [given], [*edges, weight, bias], retain_graph=True)
    with torch.no_grad():
        halves = [half.run() for half in collect_weight_backwards(nodes, arrived)]
    found = [gradient for half in halves for gradient in half if gradient is not None]
    whole = [gradient for gradient in (of_weight, of_bias) if gradient is not None]
    same = len(found) == len(whole) == 2 and all(map(torch.equal, found, whole))
    return same and not without and leaves == {id(weight), id(bias), id(x)}


def _hooks_saved_tensors() -> bool:
    """Check that hooks on saved tensors are called inside their block, and removed after it."""
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    with enter_saved_hooks(pack, unpack):
        inside = tuple(read_hooks()) == (pack, unpack)
        _make_leaf().exp()
    return inside and len(packed) == 1 and read_hooks() is None


class _Silent(TorchDispatchMode):
    """Runs operators unchanged."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _leaves_modes() -> bool:
    """Check that modes can be read, and restored from outside if an interrupt skipped the end of a block."""
    before = Modes.read()
    with enter_dispatch_mode(_Silent()):  # type: ignore[no-untyped-call]
        inside = Modes.read().dispatches
    torch.set_grad_enabled(not before.grad)
    torch.autocast_increment_nesting()
    before.put_back()
    return inside == before.dispatches + 1 and Modes.read() == before


def _sees_functions() -> bool:
    """Check that calls of autograd.Functions can be replaced, as front ends do."""
    seen: list[object] = []
    function = type("Seen", (torch.autograd.Function,), {})
    with patch_method(find_owner_of_apply(), "apply", lambda _: lambda *args: seen.extend(args)):
        function.apply(1)  # type: ignore[attr-defined]
    return seen == [function, 1]


PROBES: Mapping[str, Callable[[], bool]] = {
    "does not return gradients without adding them to .grad": _returns_gradients,
    "does not call gradient hooks from the dictionaries of tensors": _mutes_hooks,
    "does not show in reference counts whether a gradient is shared": _shows_shared_gradients,
    "does not show which tensors share memory, or count writes to them": _shows_shared_memory,
    "does not lead from autograd's nodes to their leaves": _finds_nodes,
    "does not call hooks on saved tensors, or does not drop them": _hooks_saved_tensors,
    "does not show which modes a thread is in, or cannot leave them": _leaves_modes,
    "does not let calls of autograd.Functions be replaced": _sees_functions,
}
"""The probes, by the complaint about a torch that fails them."""


@cache
def probe_torch() -> None:
    """Raise TorchError for the first probe that the installed torch fails, and learn how torch phrases its errors.

    Runs once in a process.
    """
    # A new thread is in none of the caller's modes.
    with ThreadPoolExecutor(1, "fxsplit-probes") as pool:
        for what, probe in PROBES.items():
            try:
                held = pool.submit(probe).result()
            except Exception as error:
                refuse(f"{what} ({type(error).__name__}: {error})", error)
            if not held:
                refuse(what)
    learn_words()
