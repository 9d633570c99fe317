"""Leaves, and the hooks on their gradients."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from fxsplit.torch_internals.autograd.leaves import (
    BEFORE,
    comes_through,
    find_leaves,
    find_recorded_leaves,
    hide_gradients,
    list_gradient_hooks,
    mute,
    put_hook_behind,
    unmute,
    watch_hooks,
)


def leaf(*shape: int) -> Tensor:
    return torch.ones(*shape, requires_grad=True)


def double(gradient: Tensor) -> Tensor:
    return gradient * 2


def test_leaves_of_a_result() -> None:
    a, b, data = leaf(2), leaf(2), torch.ones(2)
    found = find_leaves((a * data + b * a).sum())
    assert {id(one) for one in found} == {id(a), id(b)} and len(found) == 2
    assert find_leaves(a) == [a] and find_leaves(data) == []


def test_leaves_are_told_by_what_is_recorded_alone() -> None:
    a, b, c = leaf(2), leaf(2), leaf(2)
    assert {id(one) for one in find_recorded_leaves([a * b, c]) or []} == {id(a), id(b), id(c)}
    assert find_recorded_leaves([(a * b.detach()).sum()]) == [a]

    class Gives(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return None

    assert find_recorded_leaves([Gives.apply(a) * 2]) is None, "it may give no gradient"  # type: ignore[no-untyped-call]


def test_the_search_ends_at_the_nodes_below() -> None:
    weight, scale = leaf(2), leaf(1)
    outputs = (weight * 2).exp()
    assert outputs.grad_fn is not None
    found = find_leaves((outputs * scale).sum(), [outputs.grad_fn])
    assert len(found) == 1 and found[0] is scale


def test_a_hook_behind_a_leaf_is_one_of_torchs_own() -> None:
    calls: list[str] = []
    first, second = leaf(2), leaf(2)
    for one in (first, second):
        put_hook_behind(one, lambda tensor: calls.append("ours"))
    handles = [first.register_post_accumulate_grad_hook(lambda tensor: calls.append("theirs")) for _ in range(2)]
    assert torch.autograd.grad((first * 2).sum(), first)[0].tolist() == [2, 2] and calls == []
    (first * 2).sum().backward()
    assert calls == ["ours", "theirs", "theirs"]
    for handle in handles:
        handle.remove()
    (first + second).sum().backward()
    assert calls[3:] == ["ours", "ours"]
    with mute([first, second]):
        (first + second).sum().backward()
    assert len(calls) == 5


def test_muted_leaves_call_no_hooks_and_get_them_back() -> None:
    weight = leaf(2)
    calls: list[str] = []
    weight.register_hook(lambda gradient: calls.append("before"))
    weight.register_post_accumulate_grad_hook(lambda tensor: calls.append("after"))
    with pytest.raises(ValueError, match="stop"), mute([weight, leaf(1)]):
        (weight * 1).sum().backward()
        assert calls == []
        raise ValueError("stop")
    (weight * 1).sum().backward()
    assert calls == ["before", "after"]


def test_muted_hooks_stay_where_they_are() -> None:
    """Removing them for the duration of a step lost them for ever if an interrupt came at the wrong line."""
    weight = leaf(2)
    handle = weight.register_hook(double)
    with mute([weight]):
        assert weight._backward_hooks is not None and list(weight._backward_hooks.values()) == [double]
        with unmute():
            assert torch.autograd.grad((weight * 1).sum(), weight)[0].tolist() == [2, 2]
        assert torch.autograd.grad((weight * 1).sum(), weight)[0].tolist() == [1, 1]
    weight.sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [2, 2]
    handle.remove()
    assert not weight._backward_hooks


def test_hooks_are_muted_for_one_thread_alone() -> None:
    weight = leaf(2)
    weight.register_hook(double)
    with mute([weight]), ThreadPoolExecutor(1) as pool:
        (found,) = pool.submit(torch.autograd.grad, (weight * 1).sum(), weight).result()
    assert found.tolist() == [2, 2]


def test_a_muted_thread_runs_its_backwards_itself() -> None:
    """On a GPU, autograd would use threads of its own, in which no hook is muted."""
    weight = leaf(2)
    assert torch.autograd.is_multithreading_enabled()
    with mute([weight]):
        with unmute(), mute([weight], [BEFORE]):
            assert not torch.autograd.is_multithreading_enabled()
        assert not torch.autograd.is_multithreading_enabled()
    assert torch.autograd.is_multithreading_enabled()


def test_dictionaries_of_hooks_are_those_that_autograd_reads() -> None:
    weight = leaf(2)
    assert list_gradient_hooks(weight) == []
    handle = weight.register_hook(lambda gradient: gradient * 3)
    (hooks,) = list_gradient_hooks(weight)
    assert len(hooks) == 1
    hooks.clear()
    weight.sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [1, 1]
    handle.remove()


@pytest.mark.parametrize("mode", [nullcontext(), torch.device("cpu")], ids=["no mode", "a default device"])
def test_hooks_that_a_block_puts_on_tensors_are_seen(mode: AbstractContextManager[object]) -> None:
    """A default device is a mode of torch's functions, under which each hook was seen twice."""
    weight = leaf(2)
    seen: list[Tensor] = []
    with mode, watch_hooks(seen.append):
        handle = weight.register_hook(lambda gradient: gradient * 3)
    weight.register_hook(lambda gradient: gradient)
    assert len(seen) == 1 and seen[0] is weight
    weight.sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [3, 3], "the hook was registered"
    handle.remove()


def test_a_hook_is_not_called_without_a_gradient() -> None:
    """The hook of a weight in front of a detached stage was called with None."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> None:
            return None

    leaf = torch.ones(2, requires_grad=True)
    seen: list[Tensor] = []
    leaf.register_hook(seen.append)
    with mute([leaf]):
        pass
    Nothing.apply(leaf).sum().backward()  # type: ignore[no-untyped-call]
    assert not seen


def test_a_backward_knows_where_it_will_come_through() -> None:
    """A leaf is found by its own node; without leaves, any other node of the graph counts."""
    weight, start = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    inner = start * weight
    other = weight.exp()
    seen: list[tuple[bool, bool, bool]] = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            seen.append((comes_through([start], ()), comes_through((), [inner]), comes_through((), [other])))
            return gradient

    def run(*beside: Tensor) -> tuple[bool, bool, bool]:
        asked = Asks.apply(torch.ones(2, requires_grad=True) * weight)  # type: ignore[no-untyped-call]
        torch.stack([asked, *beside]).sum().backward(retain_graph=True)
        return seen[-1]

    assert run() == (False, False, False) and run(weight) == (False, False, False)
    assert run(inner) == (True, True, False) and run(inner.exp()) == (True, True, False)
    assert run(other) == (False, False, True)


def test_hidden_gradients_come_back() -> None:
    """Even if the block fails."""
    a, b = leaf(2), leaf(2)
    held = a.grad = torch.full((2,), 5.0)

    def add_and_fail() -> None:
        with hide_gradients([a, b]):
            assert a.grad is None
            (a * b).sum().backward()
            assert a.grad is not held and b.grad is not None
            raise KeyError

    with pytest.raises(KeyError):
        add_and_fail()
    assert a.grad is held and held.tolist() == [5.0, 5.0] and b.grad is None
