"""Add the sums of a step to `.grad`: all of them or none, with the leaves' hooks run once, on the sums.

Hooks are run leaf by leaf, and a sum is let go of as soon as a hook has made another tensor of it, or autograd has
added it. So the hooks of all leaves take memory for one leaf's gradient more, and not for another set.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxsplit.torch_internals.autograd.leaves import BEFORE, has_hooks_behind, mute
from fxsplit.torch_internals.autograd.sums import Sums, differentiate, find_unshared
from fxsplit.torch_internals.scopes.undo import call_all, restore_after

Earlier = tuple[Tensor, Tensor | None, Tensor | None]
"""A leaf, the `.grad` that it had, and a copy of that where it is written to before all else is certain."""


@dataclass
class CommitRecord:
    """Says whether the sums of a step have been added to `.grad`: all of them have, or none.

    atomic: whether that is asked for, or gradients may be added while the step runs. begun: whether that goes on, so
        that some may have been.
    """

    atomic: bool = True
    added: bool = False
    begun: bool = False

    def note_on(self, error: BaseException) -> None:
        """Say on an error of the step what has become of its gradients, where that is not nothing."""
        if self.added:
            error.add_note("the step was over: its gradients have been added to .grad")
        elif self.begun:
            error.add_note("with atomic=False a part of the step's gradients may be in .grad: set them to None")


def accumulate(
    sums: Sums,
    commit: CommitRecord | None = None,
    confirm: Callable[[Collection[Tensor]], object] = lambda leaves: None,
) -> None:
    """Add the sums to `.grad` as autograd would: in place where there is a `.grad`, and with the leaves' hooks.

    Where a hook raises, or an interrupt comes, every `.grad` is as it was, unless the receipt says that all was added.
    So it is where `confirm` raises, which is called when nothing else can fail, with the leaves whose sums are left to
    be added. The sums are empty afterwards.
    """
    commit = commit or CommitRecord()
    totals = sums.totals
    # What was added to a `.grad` itself is there already.
    for leaf in [leaf for leaf, total in totals.items() if total is leaf.grad]:
        del totals[leaf]
    for leaf in [leaf for leaf in totals if leaf._backward_hooks]:
        totals[leaf] = _run_hooks(leaf, totals)
    # Hooks behind `.grad` may raise, so their leaves come first.
    watched = [leaf for leaf in totals if _needs_autograd(leaf)]
    earlier: list[Earlier] = []
    with restore_after(partial(_restore_unless_added, commit, earlier)):
        if watched:
            # The hooks before it have run.
            with mute(watched, [BEFORE]):
                for leaf in watched:
                    before = leaf.grad
                    # The sum is gone behind this, so the copies of all leaves take no more than the sums did.
                    earlier.append((leaf, before, None if before is None else before.clone()))
                    _hand_over(leaf, totals)
        earlier += [(leaf, None, None) for leaf in totals if leaf.grad is None]
        work = _plan_work(totals)
        confirm(totals.keys())
        with torch.no_grad():
            call_all([*work, partial(setattr, commit, "added", True)])
    totals.clear()


def is_plain(leaf: Tensor) -> bool:
    """Return whether a gradient may be added to a leaf's `.grad` at any time: no hook is to see it, or change it."""
    grad = leaf.grad
    if grad is None or leaf._backward_hooks or has_hooks_behind(leaf):
        return False
    alike = grad.layout is leaf.layout is torch.strided and grad.dtype == leaf.dtype and grad.device == leaf.device
    return alike and not grad.requires_grad and not torch._debug_has_internal_overlap(grad)


def _plan_work(totals: dict[Tensor, Tensor]) -> list[Callable[[], object]]:
    """Return calls that add the sums of leaves without hooks behind `.grad`.

    They run in C and without Python in between: an interrupt comes before all of it, or after.
    """
    free, hooked, held = [], [], []
    for leaf, total in totals.items():
        if leaf.grad is None:
            # Assigned, because autograd would copy a sum, to which `totals` still refers.
            free.append(partial(setattr, leaf, "grad", total))
        elif leaf._backward_hooks:
            # Past autograd, which would call the hooks again: what they do when they are muted is Python.
            hooked.append(partial(leaf.grad.add_, total))
        else:
            held.append((leaf, total))
    return [*([_add(*zip(*held, strict=True))] if held else []), *hooked, *free]


def _needs_autograd(leaf: Tensor) -> bool:
    """Return whether autograd itself is to add a leaf's sum: it runs hooks behind that, and may make a new `.grad`."""
    if has_hooks_behind(leaf):
        return True
    # A dense gradient and a sparse one make another tensor than the sparse one.
    return bool(leaf._backward_hooks) and leaf.grad is not None and leaf.grad.layout is not torch.strided


def _run_hooks(leaf: Tensor, totals: dict[Tensor, Tensor]) -> Tensor:
    """Take a leaf's sum out of `totals`, and return what the leaf's hooks make of it; nothing is added yet."""
    # Nothing else refers to the sum, which is not needed any more where a hook makes another tensor of it.
    handed = [totals.pop(leaf)]
    found = differentiate([leaf], handed, [leaf])
    handed.clear()
    (unshared,) = find_unshared(found)
    (gradient,) = found
    assert gradient is not None, "a leaf's gradient goes to the leaf itself"
    # A hook may have stored the tensor, which `.grad` must not become then.
    return gradient if unshared or leaf.grad is not None else gradient.clone()


class _Handed(torch.autograd.Function):
    """An operator whose gradient is a leaf's sum; autograd alone holds that, and makes it `.grad` without a copy."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, totals: dict[Tensor, Tensor]) -> Tensor:
        """Return a tensor without elements that depends on the leaf."""
        ctx.take = partial(totals.pop, leaf)
        return torch.empty(0, device=leaf.device)

    @staticmethod
    def backward(ctx: Any, *nothing: Any) -> Any:
        """Return the leaf's sum, which is in `totals` no longer."""
        return ctx.take(), None


def _hand_over(leaf: Tensor, totals: dict[Tensor, Tensor]) -> None:
    """Let autograd add a leaf's sum to its `.grad` and run the hooks behind that; the sum leaves `totals`."""
    with torch.enable_grad():
        root = _Handed.apply(leaf, totals)  # type: ignore[no-untyped-call]
    _add([root], [torch.empty_like(root, requires_grad=False)])()


def _add(roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> Callable[[], object]:
    """Return a call of autograd, in C alone for leaves, that adds the gradients of all leaves to their `.grad`."""
    # What torch.autograd.backward calls: retain_graph=False, create_graph=False, to all leaves.
    run = torch.autograd.Variable._execution_engine.run_backward
    return partial(run, tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _restore_unless_added(commit: CommitRecord, earlier: Sequence[Earlier]) -> None:
    """Give every leaf the `.grad` that it had, unless all sums have been added."""
    if commit.added:
        return
    for leaf, gradient, value in earlier:
        if gradient is not None and value is not None:
            with torch.no_grad():
                gradient.copy_(value)
        leaf.grad = gradient
