"""Large gradients are added to their sums as autograd computes them; hooks of that are gone afterwards."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.torch_internals.autograd import sums as gradient_sums
from fxsplit.torch_internals.autograd.leaves import mute
from fxsplit.torch_internals.autograd.sums import EagerAccumulator, Sums, differentiate_into
from tests.support.models import FAST


@pytest.fixture(autouse=True)
def in_the_workers_way() -> Any:
    """Autograd runs backwards in the thread that calls, as in workers."""
    # How many references Python counts is measured once in a process: other tests, which trace and compile code, may
    # have changed that since.
    gradient_sums._count_holders.cache_clear()
    with torch.autograd.set_multithreading_enabled(False):
        yield


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def run(sums: Sums, out: Tensor, leaves: list[Tensor]) -> tuple[list[Tensor | None], set[int]]:
    """Run a backward from ones. Returns the gradients and the ids of leaves with gradients in the sums."""
    found, caught = differentiate_into(sums, [out], [torch.ones_like(out)], leaves)
    return list(found), caught


def test_large_gradients_are_in_the_sums_and_small_ones_are_handed_over() -> None:
    x, large, small = leaf(3, 9), leaf(9, 9), leaf(9)
    expected = torch.autograd.grad(F.linear(x, large, small).exp().sum(), [x, large, small])
    accumulator, sums = EagerAccumulator(), Sums()
    with accumulator.watch([large, small]):
        for times in (1, 2, 3):
            out = F.linear(x, large, small).exp().sum()
            (of_x, nothing, of_small), caught = run(sums, out, [x, large, small])
            assert caught == {id(large)} and list(sums.totals) == [large]
            assert torch.allclose(sums.totals[large], times * expected[1], rtol=1e-12)
            assert of_x is not None and torch.equal(of_x, expected[0])
            assert of_small is not None and torch.equal(of_small, expected[2])
            assert nothing is not None and nothing.untyped_storage().nbytes() == 8, "it takes no memory"


def test_the_size_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    w = leaf(4, 4)
    for least, large in ((w.nbytes, True), (w.nbytes + 1, False)):
        monkeypatch.setattr(gradient_sums, "LEAST_BYTES", least)
        with EagerAccumulator().watch([w]):
            assert run(Sums(), w.exp().sum(), [w])[1] == ({id(w)} if large else set())


MAKE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "an operator's own": lambda w, v: w.exp(),
    "a transposed product": lambda w, v: F.linear(v.detach(), w),
    "two users": lambda w, v: w.exp() * w.sin(),
    "one tensor for two leaves": lambda w, v: (w + v).exp(),
    "two views of one tensor": lambda w, v: torch.cat([w, v]).exp(),
    "one element in all places": lambda w, v: w + 0.0 * v.detach(),
}


@pytest.mark.parametrize("name", MAKE)
def test_a_sum_has_memory_of_its_own(name: str) -> None:
    """The first gradient becomes the sum if nothing shares its memory, and is copied otherwise."""
    w, v = leaf(6, 6), leaf(6, 6)
    expected = torch.autograd.grad(MAKE[name](w, v).sum(), [w, v], allow_unused=True)
    copied: list[bool] = []
    places: list[int] = []
    w.register_hook(lambda gradient: places.append(gradient.data_ptr()))
    accumulator, sums = EagerAccumulator(), Sums()
    with accumulator.watch([w, v]):
        for _ in range(2):
            run(sums, MAKE[name](w, v).sum(), [w, v])
            copied.append(sums.totals[w].data_ptr() not in places)
    for one, gradient in zip((w, v), expected, strict=True):
        assert (one in sums.totals) == (gradient is not None)
        assert gradient is None or torch.allclose(sums.totals[one], 2 * gradient, rtol=1e-12)
    assert copied == [name in list(MAKE)[3:]] * 2


@pytest.mark.parametrize("name", MAKE)
def test_the_older_memory_is_let_go(name: str) -> None:
    """A gradient that nobody else has takes over the sum; one that somebody has is added to it, and not written to."""
    w, v = leaf(6, 6), leaf(6, 6)
    expected = torch.autograd.grad(MAKE[name](w, v).sum(), [w, v], allow_unused=True)
    accumulator, sums = EagerAccumulator(), Sums()
    with accumulator.watch([w]):
        run(sums, MAKE[name](w, v).sum(), [w, v])
        total = sums.totals[w]
        handed = run(sums, MAKE[name](w, v).sum(), [w, v])[0][1]
    own = name in ("an operator's own", "a transposed product", "two users")
    assert (sums.totals[w] is not total) == own
    assert expected[0] is not None and torch.equal(sums.totals[w], 2 * expected[0])
    assert torch.equal(total, expected[0] if own else 2 * expected[0])
    assert (handed is None) == (expected[1] is None)
    assert handed is None or expected[1] is None or torch.equal(handed, expected[1])


def test_a_sum_of_other_strides_stays() -> None:
    w, sums = leaf(6, 6), Sums()
    with EagerAccumulator().watch([w]):
        run(sums, w.t().contiguous().exp(), [w])
        total = sums.totals[w]
        run(sums, w.exp(), [w])
    assert total.stride() == (1, 6) and sums.totals[w] is total
    assert torch.equal(total, 2 * w.exp())


def test_a_gradient_that_a_hook_keeps_is_copied() -> None:
    w, kept = leaf(6, 6), list[Tensor]()
    w.register_hook(kept.append)
    accumulator, sums = EagerAccumulator(), Sums()
    with accumulator.watch([w]):
        run(sums, w.exp().sum(), [w])
        run(sums, w.exp().sum(), [w])
    assert torch.equal(kept[0], w.exp()) and torch.allclose(sums.totals[w], 2 * w.exp())


def test_sparse_gradients_are_handed_over() -> None:
    table = nn.Embedding(50, 4, sparse=True, dtype=torch.float64)
    accumulator, sums = EagerAccumulator(), Sums()
    with accumulator.watch([table.weight]):
        (found,), caught = run(sums, table(torch.tensor([1, 2])).sum(), [table.weight])
    assert found is not None and found.is_sparse and not caught and not sums.totals


def test_a_dense_gradient_is_added_to_a_sparse_sum() -> None:
    table = nn.Embedding(50, 4, sparse=True, dtype=torch.float64)
    (sparse,) = torch.autograd.grad(table(torch.tensor([1, 2])).sum(), [table.weight])
    accumulator, sums = EagerAccumulator(), Sums({table.weight: sparse})
    with accumulator.watch([table.weight]):
        run(sums, table.weight.exp().sum(), [table.weight])
    assert torch.allclose(sums.totals[table.weight], sparse.to_dense() + table.weight.exp())


def test_hooks_of_the_users_stay_and_others_do_not() -> None:
    plain, hooked, seen = leaf(9, 9), leaf(9, 9), list[Tensor]()
    handle = hooked.register_hook(seen.append)
    with EagerAccumulator().watch([plain, hooked]):
        assert all(one._backward_hooks for one in (plain, hooked))
    assert not plain._backward_hooks and list(hooked._backward_hooks or {}) == [handle.id]
    torch.autograd.backward((plain * hooked).sum())
    assert plain.grad is not None and torch.equal(plain.grad, hooked) and len(seen) == 1


def test_to_mute_hooks_of_the_users_leaves_it_to_catch() -> None:
    """The leaves of a loss function are muted after they are watched; those of earlier stages before."""
    watched, seen, sums = leaf(99, 99), list[Tensor](), Sums()
    watched.register_hook(seen.append)
    with EagerAccumulator().watch([watched]), mute([watched]):
        _, caught = run(sums, watched.exp().sum(), [watched])
    assert caught == {id(watched)} and not seen
    assert torch.equal(sums.totals[watched], watched.exp())


class Scaled(nn.Module):
    """A loss with a large parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(99, 99).double()

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.scale(outputs), target)


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_gradients_of_a_loss_are_caught_too(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were muted with the hooks of the user's, and a device had one more of them than the unsplit model."""
    caught: list[Tensor] = []
    take = EagerAccumulator._take

    def note(self: EagerAccumulator, leaf: Tensor, gradient: Tensor) -> Tensor | None:
        caught.append(leaf)
        return take(self, leaf, gradient)

    monkeypatch.setattr(EagerAccumulator, "_take", note)
    loss, model = Scaled(), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 99)).double()
    x, y = torch.randn(8, 4).double(), torch.randn(8, 99).double()
    wanted = copy.deepcopy((model, loss))
    options: Any = {"n_microbatches": 4, "passes": FAST, "recompute": recompute}
    with fxsplit.compile(model, 2, example_inputs=x, loss_fn=loss, **options) as pipe:
        pipe.step(x, target=y)
    assert [one for one in caught if one is loss.scale.weight] == [loss.scale.weight] * 4
    wanted[1](wanted[0](x), y).backward()
    for a, b in zip(loss.parameters(), wanted[1].parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-10)


def test_a_backward_of_the_users_own_is_left_alone() -> None:
    """Watched leaves get their gradients in any other backward, in this thread and in other threads."""
    w, v = leaf(9, 9), leaf(9, 9)
    accumulator = EagerAccumulator()
    with accumulator.watch([w]):
        assert torch.equal(torch.autograd.grad(w.exp().sum(), [w])[0], w.exp())
        sums, found = Sums(), list[Tensor]()
        other = threading.Thread(target=lambda: found.extend(torch.autograd.grad(w.exp().sum(), [w])))

        def wait_for_the_other(_: Tensor) -> None:
            other.start()
            other.join()

        v.register_hook(wait_for_the_other)
        run(sums, v.exp().sum(), [v])
    assert torch.equal(found[0], w.exp()) and not sums.totals


class Recomputed(torch.autograd.Function):
    """The exponential of a weight. Its backward recomputes it, and doubles the gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return weight.detach().exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            (found,) = torch.autograd.grad(ctx.weight.exp(), [ctx.weight], gradient)
        return 2.0 * found


def test_a_backward_inside_of_this_one_has_its_gradients() -> None:
    w, accumulator, sums = leaf(9, 9), EagerAccumulator(), Sums()
    with accumulator.watch([w]):
        run(sums, Recomputed.apply(w).sum(), [w])  # type: ignore[no-untyped-call]
    assert torch.allclose(sums.totals[w], 2 * w.exp(), rtol=1e-12)


def test_threads_with_a_leaf_in_common_have_sums_of_their_own() -> None:
    w, accumulator = leaf(20, 20), EagerAccumulator()
    both = [Sums(), Sums()]
    at_once = threading.Barrier(2)

    def work(sums: Sums, times: int) -> None:
        with torch.autograd.set_multithreading_enabled(False):
            at_once.wait(20.0)
            for _ in range(times):
                run(sums, w.exp().sum(), [w])

    with accumulator.watch([w]):
        threads = [threading.Thread(target=work, args=(sums, 20 + i)) for i, sums in enumerate(both)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for i, sums in enumerate(both):
        assert torch.allclose(sums.totals[w], (20 + i) * w.exp(), rtol=1e-12)


def test_a_leaf_may_join_later() -> None:
    w, accumulator, sums = leaf(9, 9), EagerAccumulator(), Sums()
    with accumulator.watch([]):
        accumulator.add([w])
        accumulator.add([w])
        assert run(sums, w.exp().sum(), [w])[1] == {id(w)}
    assert not w._backward_hooks


def test_without_sums_all_gradients_are_handed_over() -> None:
    w = leaf(9, 9)
    with EagerAccumulator().watch([w]):
        (found,), caught = differentiate_into(None, [w.exp()], [torch.ones_like(w)], [w])
    assert found is not None and torch.equal(found, w.exp()) and not caught


def test_a_leaf_that_comes_too_late_is_left_alone() -> None:
    """An abandoned worker continues after the end of the block."""
    w, accumulator = leaf(9, 9), EagerAccumulator()
    with accumulator.watch([]):
        pass
    accumulator.add([w])
    assert not w._backward_hooks


def test_a_sparse_leaf_is_left_alone() -> None:
    dense = leaf(20, 20)
    sparse = dense.detach().to_sparse().requires_grad_()
    with EagerAccumulator().watch([sparse, dense]):
        assert dense._backward_hooks and not sparse._backward_hooks


SCRIPT = """
import gc, resource, warnings
import torch, fxsplit
from torch import nn
from torch.nn import functional as F
warnings.simplefilter("ignore")
model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(48)], nn.Linear(512, 8))
x, y = torch.randn(8, 512), torch.randint(8, (8,))
pipe = fxsplit.compile(model, ["cpu"] * 2, example_inputs=x, n_microbatches=4, loss_fn=F.cross_entropy,
                       passes="profile{repeats=1},augment,order,partition,emit")
weights = sum(p.nbytes for p in model.parameters())
for loop in (lambda: pipe.step(x, target=y), lambda: F.cross_entropy(pipe(x), y).backward()):
    loop()
    for times in (0.9, 1.5):
        model.zero_grad()
        gc.collect()
        mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + int(times * weights), resource.RLIM_INFINITY))
        try:
            loop()
            print("fits", end=" ")
        except RuntimeError as error:
            print("too little" if "memory" in str(error) else repr(error), end=" ")
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say what a process has mapped")
@pytest.mark.long
def test_a_step_takes_memory_for_one_set_of_gradients() -> None:
    """A process that may map memory for 1.5 sets of gradients computes one; with 0.9 it cannot."""
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "PATH": ""}
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=settings | {"PYTHONPATH": str(root)}, cwd=root, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout == "too little fits too little fits ", done.stderr[-2000:]
