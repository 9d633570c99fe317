"""How torch has to behave, tried out on small tensors at a process's first capture: a torch that does not is refused.

A name that is still there may mean something else in a new release. What follows from that would be wrong gradients,
and no error.
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
    """Return a leaf of four ones, whatever the default device and dtype are."""
    return torch.ones(2, 2, dtype=torch.float64, device="cpu", requires_grad=True)


def _hands_gradients_back() -> bool:
    """Try that the engine returns gradients, and leaves `.grad` alone."""
    leaf = _make_leaf()
    (found,) = differentiate([leaf * 3], [torch.ones_like(leaf)], [leaf])
    return found is not None and bool((found == 3).all()) and leaf.grad is None


def _mutes_hooks() -> bool:
    """Try that autograd calls hooks from the dictionaries in which they are muted, before and behind `.grad`."""
    leaf, calls = _make_leaf(), []
    leaf.register_hook(lambda _: calls.append("before"))
    leaf.register_post_accumulate_grad_hook(lambda _: calls.append("behind"))
    with mute([leaf]):
        leaf.sum().backward()
        muted = not calls
    leaf.sum().backward()
    return muted and calls == ["before", "behind"]


def _tells_shared_gradients() -> bool:
    """Try that a gradient which two leaves get, or an expanded one, is not taken for memory of its own."""
    a, b = _make_leaf(), _make_leaf()
    same = differentiate([a + b], [torch.ones_like(a)], [a, b])
    expanded = differentiate([a.sum()], [torch.ones_like(a.sum())], [a])
    return not any((*find_unshared(same), *find_unshared(expanded)))


def _tells_memory() -> bool:
    """Try that views share a number, that clones do not, and that writes through a view count."""
    a = _make_leaf().detach()
    view, clone, before = a.view(-1), a.clone(), count_writes(a)
    view.add_(1)
    return get_storage_id(view) == get_storage_id(a) != get_storage_id(clone) and count_writes(a) != before


def _finds_nodes() -> bool:
    """Try that autograd's nodes lead to their leaves, and that weights get their gradients in a half of their own."""
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
    """Try that hooks on saved tensors are called, and are gone behind their block."""
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
    """Runs operators as they are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        return func(*args, **(kwargs or {}))


def _leaves_modes() -> bool:
    """Try that modes are read, and put back from outside, where an interrupt has kept a block from ending."""
    before = Modes.read()
    with enter_dispatch_mode(_Silent()):  # type: ignore[no-untyped-call]
        inside = Modes.read().dispatches
    torch.set_grad_enabled(not before.grad)
    torch.autocast_increment_nesting()
    before.put_back()
    return inside == before.dispatches + 1 and Modes.read() == before


def _sees_functions() -> bool:
    """Try that the calls of autograd.Functions can be replaced, as front ends do."""
    seen: list[object] = []
    function = type("Seen", (torch.autograd.Function,), {})
    with patch_method(find_owner_of_apply(), "apply", lambda _: lambda *args: seen.extend(args)):
        function.apply(1)  # type: ignore[attr-defined]
    return seen == [function, 1]


PROBES: Mapping[str, Callable[[], bool]] = {
    "does not hand gradients back without adding them to .grad": _hands_gradients_back,
    "does not call gradient hooks from the dictionaries that tensors have of them": _mutes_hooks,
    "does not tell from counts of references who shares a gradient": _tells_shared_gradients,
    "does not tell which tensors share memory, or whether they were written to": _tells_memory,
    "does not lead from autograd's nodes to the leaves behind them": _finds_nodes,
    "does not call hooks on saved tensors, or does not drop them": _hooks_saved_tensors,
    "does not say which modes a thread is in, or cannot leave them": _leaves_modes,
    "does not let calls of autograd.Functions be replaced": _sees_functions,
}
"""What a torch does otherwise, by the function that tries it."""


@cache
def probe_torch() -> None:
    """Raise TorchError for the first thing that the installed torch does otherwise; tried once in a process.

    How it phrases its errors is learnt too.
    """
    # In a thread of its own, which is in none of the caller's modes.
    with ThreadPoolExecutor(1, "fxsplit-probes") as pool:
        for what, probe in PROBES.items():
            try:
                held = pool.submit(probe).result()
            except Exception as error:
                refuse(f"{what} ({type(error).__name__}: {error})", error)
            if not held:
                refuse(what)
    learn_words()
