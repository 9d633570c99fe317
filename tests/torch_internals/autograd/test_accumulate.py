"""Sums are added to `.grad` as autograd would: all of them or none, through hooks, and without another set of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fxsplit.torch_internals.autograd.accumulate import CommitRecord, accumulate
from fxsplit.torch_internals.autograd.sums import Sums
from fxsplit.torch_internals.scopes.undo import restores_all
from tests.support.interrupts import interrupt_at, list_lines


def test_accumulating_is_what_autograd_does() -> None:
    """Sums are added in place if there is a gradient, assigned if there is none, and passed through hooks."""
    new, old, hooked = (torch.zeros(2, requires_grad=True) for _ in range(3))
    old.grad = before = torch.ones(2)
    hooked.register_hook(lambda gradient: gradient * 2)
    sums = Sums()
    sums.add([(leaf, torch.full((2,), 5.0), True) for leaf in (new, old, hooked)])
    total = sums.totals[new]
    accumulate(sums)
    assert new.grad is total and old.grad is before and not sums.totals
    assert [float(leaf.grad.sum()) for leaf in (new, old, hooked)] == [10, 12, 20]  # type: ignore[union-attr]
    accumulate(Sums())


def make_leaves() -> dict[str, Tensor]:
    """Leaves of every kind: with and without a gradient, with hooks before and after `.grad`."""
    leaves = {name: torch.zeros(2, requires_grad=True) for name in ("new", "old", "hooked", "watched", "plain")}
    for name in ("old", "hooked", "watched"):
        leaves[name].grad = torch.ones(2)
    leaves["hooked"].register_hook(lambda gradient: gradient * 2)
    return leaves


def read_gradients(leaves: dict[str, Tensor]) -> list[list[float] | None]:
    return [None if leaf.grad is None else leaf.grad.tolist() for leaf in leaves.values()]


@pytest.mark.parametrize("which", ["before", "behind"])
def test_a_hook_that_raises_leaves_every_gradient_as_it_was(which: str) -> None:
    """The gradients of earlier leaves had already been added."""
    leaves, sums = make_leaves(), Sums()
    held = {name: leaf.grad for name, leaf in leaves.items()}
    watched: Any = leaves["watched"]
    register = watched.register_hook if which == "before" else watched.register_post_accumulate_grad_hook
    register(lambda _: divmod(1, 0))
    sums.add([(leaf, torch.ones(2), True) for leaf in leaves.values()])
    before, record = read_gradients(leaves), CommitRecord()
    with pytest.raises(ZeroDivisionError):
        accumulate(sums, record)
    assert read_gradients(leaves) == before and not record.added
    assert all(leaf.grad is held[name] for name, leaf in leaves.items())


def test_an_interrupt_comes_before_all_gradients_or_after() -> None:
    """At every line of the code, either nothing or everything has been added, and the commit record says so."""
    calls: list[str] = []

    def make() -> tuple[dict[str, Tensor], Sums]:
        leaves, sums = make_leaves(), Sums()
        watched: Any = leaves["watched"]
        watched.register_post_accumulate_grad_hook(lambda _: calls.append("behind"))
        sums.add([(leaf, torch.ones(2), True) for leaf in leaves.values()])
        return leaves, sums

    @restores_all
    def commit(sums: Sums, record: CommitRecord) -> None:
        accumulate(sums, record)

    leaves, sums = make()
    before = read_gradients(leaves)
    lines = list_lines(partial(commit, sums, CommitRecord()))
    after = read_gradients(leaves)
    assert after == [[1, 1], [2, 2], [3, 3], [2, 2], [1, 1]] and calls == ["behind"]
    outcomes = set()
    for number in range(len(lines)):
        leaves, sums = make()
        record = CommitRecord()
        with pytest.raises(KeyboardInterrupt), interrupt_at(number):
            commit(sums, record)
        assert read_gradients(leaves) == (after if record.added else before), lines[number]
        outcomes.add(record.added)
    assert outcomes == {True, False}


def double(leaf: Tensor) -> None:
    """A hook after `.grad` that writes to it."""
    assert leaf.grad is not None
    leaf.grad.mul_(2)


def double_in_place(gradient: Tensor) -> None:
    gradient.mul_(2)


HOOKS: dict[str, Callable[[Tensor], Any]] = {
    "scale": lambda leaf: leaf.register_hook(lambda gradient: gradient * 2),
    "in place": lambda leaf: leaf.register_hook(double_in_place),
    "look": lambda leaf: leaf.register_hook(lambda gradient: None),
    "behind": lambda leaf: leaf.register_post_accumulate_grad_hook(double),
    "scale and behind": lambda leaf: [HOOKS[name](leaf) for name in ("scale", "behind")],
    "forget": lambda leaf: leaf.register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", None)),
}
EARLIER: dict[str, Callable[[], Tensor | None]] = {
    "none": lambda: None,
    "dense": lambda: torch.arange(4.0),
    "sparse": lambda: torch.arange(4.0).to_sparse(),
}
SUMS: dict[str, Callable[[], Tensor]] = {"dense": lambda: torch.ones(4), "sparse": lambda: torch.ones(4).to_sparse()}


@pytest.mark.parametrize("total", SUMS)
@pytest.mark.parametrize("earlier", EARLIER)
@pytest.mark.parametrize("hooks", [name for name in HOOKS if name != "in place"])
def test_hooks_and_layouts_are_autograds(hooks: str, earlier: str, total: str) -> None:
    """Compare `.grad` with autograd's, and require the same memory if autograd adds in place."""
    leaves = [torch.zeros(4, requires_grad=True) for _ in range(2)]
    held = []
    for leaf in leaves:
        leaf.grad = EARLIER[earlier]()
        held.append(leaf.grad)
        if not (hooks == "scale and behind" and "sparse" in (earlier, total)):
            HOOKS[hooks](leaf)
    torch.autograd.backward([leaves[0]], [SUMS[total]()])
    accumulate(Sums({leaves[1]: SUMS[total]()}))
    expected, found = (leaf.grad for leaf in leaves)
    assert (expected is None) == (found is None) == (hooks == "forget")
    if expected is not None and found is not None:
        assert expected.layout == found.layout and torch.equal(expected.to_dense(), found.to_dense())
        assert (expected is held[0]) == (found is held[1])


def test_what_a_hook_has_stored_is_nobody_elses() -> None:
    """A hook keeps the gradient that it was called with: `.grad` is another tensor."""
    leaf, seen = torch.zeros(4, requires_grad=True), list[Tensor]()
    leaf.register_hook(seen.append)
    accumulate(Sums({leaf: torch.ones(4)}))
    assert leaf.grad is not None and leaf.grad.data_ptr() != seen[0].data_ptr()
    leaf.grad.zero_()
    assert seen[0].tolist() == [1, 1, 1, 1]


def measure_peak(run: Callable[[], object]) -> int:
    """Return the peak of the bytes that a run allocates in this thread.

    The run allocates all memory that it frees: the profiler does not know earlier allocations.
    """
    # Without acc_events torch 2.11 warns that a second cycle would clear events.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        run()
    assert profiled.profiler is not None
    events = profiled.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return int(max(itertools.accumulate((size for _, size in changes), initial=0)))


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("hooks", HOOKS)
def test_hooks_on_all_leaves_take_memory_for_one(hooks: str, before: bool) -> None:
    """Before, they took the memory of all sums a second time, and of all results of the hooks a third time."""
    leaves = [torch.zeros(1 << 14, requires_grad=True) for _ in range(20)]
    for leaf in leaves:
        HOOKS[hooks](leaf)

    def run() -> None:
        for leaf in leaves:
            leaf.grad = torch.ones_like(leaf) if before else None
        accumulate(Sums({leaf: torch.ones_like(leaf) for leaf in leaves}))

    sets = measure_peak(run) / sum(leaf.nbytes for leaf in leaves)
    assert 1 + before <= sets < 1 + before + 1.1 / 20
