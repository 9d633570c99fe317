"""Add the summed gradients of a step to `.grad`: of all leaves or of none. Each leaf's hooks run once, on its sum.

Hooks run leaf by leaf. A sum is freed as soon as a hook has replaced it or autograd has added it. So the hooks of all
leaves need extra memory for only one leaf's gradient at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxsplit.torch_internals.autograd.leaves import BEFORE, find_hooked, has_hooks_behind, mute
from fxsplit.torch_internals.autograd.sums import Sums, differentiate, find_unshared
from fxsplit.torch_internals.scopes.undo import call_all, restore_after

Earlier = tuple[Tensor, Tensor | None, Tensor | None]
"""A leaf, its earlier `.grad`, and a copy of that `.grad` if it is written to before the commit is certain."""


@dataclass
class CommitRecord:
    """Whether the gradients of a step have been added to `.grad`.

    atomic: whether the step must add all gradients or none; otherwise gradients may be added while the step runs.
    added: whether all gradients have been added.
    begun: whether a step that is not atomic has started, so that some gradients may have been added.
    """

    atomic: bool = True
    added: bool = False
    begun: bool = False

    def note_on(self, error: BaseException) -> None:
        """Add a note to an error of the step if any of the step's gradients are in `.grad`."""
        if self.added:
            error.add_note("the step was over: its gradients have been added to .grad")
        elif self.begun:
            error.add_note("with atomic=False a part of the step's gradients may be in .grad: set them to None")


def accumulate(
    sums: Sums,
    commit: CommitRecord | None = None,
    confirm: Callable[[Collection[Tensor]], object] = lambda leaves: None,
) -> None:
    """Add the sums to `.grad` as autograd would: in place if there is a `.grad`, and with the leaves' hooks.

    If a hook raises or an interrupt comes, every `.grad` is restored, unless `commit` says that all sums were added.
    confirm: called when nothing else can fail, with the leaves that still wait for their sums. If it raises, every
        `.grad` is restored too.
    The sums are empty afterwards.
    """
    commit = commit or CommitRecord()
    totals = sums.totals
    # A sum that is the `.grad` itself has been added already.
    for leaf in [leaf for leaf, total in totals.items() if total is leaf.grad]:
        del totals[leaf]
    for leaf in [leaf for leaf in totals if leaf._backward_hooks]:
        totals[leaf] = _run_hooks(leaf, totals)
    # Hooks after `.grad` may raise, so process their leaves first.
    watched = [leaf for leaf in find_hooked(totals) if _needs_autograd(leaf)]
    earlier: list[Earlier] = []
    with restore_after(partial(_restore_unless_added, commit, earlier)):
        if watched:
            # The hooks before `.grad` have run.
            with mute(watched, [BEFORE]):
                for leaf in watched:
                    before = leaf.grad
                    # Adding frees the sum, so the copies of all leaves take no more memory than the sums did.
                    earlier.append((leaf, before, None if before is None else before.clone()))
                    _hand_over(leaf, totals)
        earlier += [(leaf, None, None) for leaf in totals if leaf.grad is None]
        work = _plan_work(totals)
        confirm(totals.keys())
        with torch.set_grad_enabled(False):
            call_all([*work, partial(setattr, commit, "added", True)])
    totals.clear()


def is_plain(leaf: Tensor) -> bool:
    """Return whether workers may add to a leaf's `.grad` at any time.

    The leaf must have a `.grad` of its own dtype, device and layout, and no hooks, which would have to see the sum
    first.
    """
    grad = leaf.grad
    if grad is None or leaf._backward_hooks or has_hooks_behind(leaf):
        return False
    alike = grad.layout is leaf.layout is torch.strided and grad.dtype == leaf.dtype and grad.device == leaf.device
    return alike and not grad.requires_grad and not torch._debug_has_internal_overlap(grad)


def _plan_work(totals: dict[Tensor, Tensor]) -> list[Callable[[], object]]:
    """Return calls that add the sums of all leaves that have no hooks after `.grad`.

    The calls run in C without any Python in between, so an interrupt comes before or after all of them.
    """
    free, hooked, held = [], [], []
    for leaf, total in totals.items():
        if leaf.grad is None:
            # Assign the sum. Autograd would copy it, since `totals` refers to it too.
            free.append(partial(setattr, leaf, "grad", total))
        elif leaf._backward_hooks:
            # Bypass autograd, which would call the hooks again. Even muted hooks run Python.
            hooked.append(partial(leaf.grad.add_, total))
        else:
            held.append((leaf, total))
    return [*([_add(*zip(*held, strict=True))] if held else []), *hooked, *free]


def _needs_autograd(leaf: Tensor) -> bool:
    """Return whether autograd itself must add a leaf's sum.

    It must if there are hooks after `.grad`, or a new `.grad`.
    """
    if has_hooks_behind(leaf):
        return True
    # Adding a dense gradient to a sparse one makes a new tensor.
    return bool(leaf._backward_hooks) and leaf.grad is not None and leaf.grad.layout is not torch.strided


def _run_hooks(leaf: Tensor, totals: dict[Tensor, Tensor]) -> Tensor:
    """Remove a leaf's sum from `totals`, run the leaf's hooks on it, and return the result. Adds nothing yet."""
    # Keep no other reference to the sum, so that it is freed if a hook replaces it.
    handed = [totals.pop(leaf)]
    found = differentiate([leaf], handed, [leaf])
    handed.clear()
    (unshared,) = find_unshared(found)
    (gradient,) = found
    assert gradient is not None, "a leaf's gradient goes to the leaf itself"
    # A hook may have stored the tensor, so it must not become `.grad`.
    return gradient if unshared or leaf.grad is not None else gradient.clone()


class _Handed(torch.autograd.Function):
    """An operator whose gradient is a leaf's sum. Only autograd holds the sum, so it becomes `.grad` without a copy."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, totals: dict[Tensor, Tensor]) -> Tensor:
        """Return an empty tensor that depends on the leaf."""
        ctx.take = partial(totals.pop, leaf)
        return torch.empty(0, device=leaf.device)

    @staticmethod
    def backward(ctx: Any, *nothing: Any) -> Any:
        """Remove the leaf's sum from `totals` and return it."""
        return ctx.take(), None


def _hand_over(leaf: Tensor, totals: dict[Tensor, Tensor]) -> None:
    """Let autograd add a leaf's sum to `.grad` and run the hooks after it. Removes the sum from `totals`."""
    with torch.enable_grad():
        root = _Handed.apply(leaf, totals)  # type: ignore[no-untyped-call]
    _add([root], [torch.empty_like(root, requires_grad=False)])()


def _add(roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> Callable[[], object]:
    """Return a call that lets autograd add the gradients of all leaves to `.grad`. For leaves it runs entirely in C."""
    # As called by torch.autograd.backward, with retain_graph=False, create_graph=False and all leaves.
    run = torch.autograd.Variable._execution_engine.run_backward
    return partial(run, tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _restore_unless_added(commit: CommitRecord, earlier: Sequence[Earlier]) -> None:
    """Restore the `.grad` of each leaf, unless all sums have been added."""
    if commit.added:
        return
    for leaf, gradient, value in earlier:
        if gradient is not None and value is not None:
            with torch.no_grad():
                gradient.copy_(value)
        leaf.grad = gradient
