"""The installed torch has the private names that fxsplit uses, and behaves as fxsplit needs."""

from __future__ import annotations

import operator
import sys
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxsplit.torch_internals.autograd.leaves import find_leaves, mute
from fxsplit.torch_internals.autograd.split import collect_weight_backwards, find_branch_nodes
from fxsplit.torch_internals.autograd.sums import differentiate, find_unshared
from fxsplit.torch_internals.fx.interpret import count_writes, get_storage_id
from fxsplit.torch_internals.scopes.modes import Modes, read_hooks
from fxsplit.torch_internals.scopes.patch import find_owner_of_apply, patch_method
from fxsplit.torch_internals.thread_modes import enter_dispatch_mode, enter_saved_hooks
from tests.house.names_used import private_uses
from tests.house.sources import modules, room

ROOMS = ("torch_internals", "frontend")
OF_TENSORS = (
    "_backward_hooks",
    "_base",
    "_is_view",
    "_make_subclass",
    "_make_wrapper_subclass",
    "_post_accumulate_grad_hooks",
    "_use_count",
    "_values",
    "_version",
)
"""Private names of tensors. No import shows that they are used."""

FLAGS = ("torch.fx._symbolic_trace._is_fx_tracing_tls", "torch.fx._symbolic_trace._is_fx_tracing_flag")
"""The flag of torch.fx while it traces: its name since torch 2.14, and its name before."""


def exists(name: str) -> bool:
    """Return whether torch has a name. Imports the modules on the way to the name."""
    found: Any = torch
    parts = name.split(".")
    for i, part in enumerate(parts[1:], 2):
        try:
            found = operator.attrgetter(part)(found)
        except AttributeError:
            path = ".".join(parts[:i])
            try:
                found = sys.modules.get(path) or import_module(path)
            except ImportError:
                return False
    return True


def test_the_installed_torch_has_all_private_names() -> None:
    used = {full: name for name in modules() if room(name) in ROOMS for full in private_uses(name, "torch")}
    assert len(used) > 60
    assert {full: name for full, name in used.items() if not exists(full) and full not in FLAGS} == {}
    assert all(hasattr(Tensor, name) for name in OF_TENSORS)
    assert not exists("torch._C._no_such_name") and not exists("torch._no_such_module.name")


def test_torch_has_one_of_the_flags_that_say_that_it_traces() -> None:
    """Without the flag, models are exported and not traced."""
    assert any(map(exists, FLAGS))


def make_leaf() -> Tensor:
    """Return a leaf of four ones."""
    return torch.ones(2, 2, dtype=torch.float64, requires_grad=True)


def test_the_engine_returns_gradients_and_does_not_write_them() -> None:
    leaf = make_leaf()
    (found,) = differentiate([leaf * 3], [torch.ones_like(leaf)], [leaf])
    assert found is not None and bool((found == 3).all()) and leaf.grad is None


def test_hooks_of_leaves_come_from_the_dictionaries_in_which_they_are_muted() -> None:
    calls: list[str] = []
    leaf = make_leaf()
    leaf.register_hook(lambda _: calls.append("before"))
    leaf.register_post_accumulate_grad_hook(lambda _: calls.append("after"))
    with mute([leaf]):
        leaf.sum().backward()
        assert not calls
    leaf.sum().backward()
    assert calls == ["before", "after"]


def test_gradients_that_leaves_share_and_expanded_ones_are_not_unshared() -> None:
    a, b = make_leaf(), make_leaf()
    same = differentiate([a + b], [torch.ones_like(a)], [a, b])
    expanded = differentiate([a.sum()], [torch.ones_like(a.sum())], [a])
    assert not any((*find_unshared(same), *find_unshared(expanded)))


def test_views_share_a_storage_and_writes_through_them_are_counted() -> None:
    a = make_leaf().detach()
    view, clone, before = a.view(-1), a.clone(), count_writes(a)
    view.add_(1)
    assert get_storage_id(view) == get_storage_id(a) != get_storage_id(clone)
    assert count_writes(a) != before


def test_nodes_lead_to_leaves_and_weight_gradients_are_a_second_half() -> None:
    weight, bias, x = make_leaf(), make_leaf()[0].detach().requires_grad_(), make_leaf()
    out = torch.nn.functional.linear(x.exp(), weight, bias).exp()
    assert {id(leaf) for leaf in find_leaves(out)} == {id(weight), id(bias), id(x)}
    nodes, without = find_branch_nodes([out], [weight, bias], small_too=True)
    edges = [edge for branch in nodes.values() for edge in branch.edges]
    *arrived, of_weight, of_bias = differentiate(
        [out], [torch.ones_like(out)], [*edges, weight, bias], retain_graph=True
    )
    with torch.no_grad():
        halves = [half.run() for half in collect_weight_backwards(nodes, arrived)]
    found = [gradient for half in halves for gradient in half if gradient is not None]
    whole = [gradient for gradient in (of_weight, of_bias) if gradient is not None]
    assert not without and len(found) == len(whole) == 2 and all(map(torch.equal, found, whole))


def test_hooks_on_saved_tensors_are_called_in_their_block_only() -> None:
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    with enter_saved_hooks(pack, unpack):
        assert tuple(read_hooks() or ()) == (pack, unpack)
        make_leaf().exp()
    assert len(packed) == 1 and read_hooks() is None


class Silent(TorchDispatchMode):
    """Runs operators unchanged."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_can_be_read_and_put_back_from_outside() -> None:
    before = Modes.read()
    with enter_dispatch_mode(Silent()):  # type: ignore[no-untyped-call]
        inside = Modes.read().dispatches
    torch.set_grad_enabled(not before.grad)
    torch.autocast_increment_nesting()
    before.put_back()
    assert inside == before.dispatches + 1 and Modes.read() == before


def test_calls_of_autograd_functions_can_be_replaced() -> None:
    seen: list[object] = []
    function = type("Seen", (torch.autograd.Function,), {})
    with patch_method(find_owner_of_apply(), "apply", lambda _: lambda *args: seen.extend(args)):
        function.apply(1)  # type: ignore[attr-defined]
    assert seen == [function, 1]
