"""Ranks remember a rank that has left: later calls fail at once. The waits of a step have a time limit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import RankError, StepTimeout
from fxsplit.runtime.ranks.failures.guard import _end_started
from fxsplit.runtime.ranks.gradients import reduction
from fxsplit.runtime.ranks.world.join import join_world
from fxsplit.torch_internals.distributed.process_groups import clone_store
from tests.support.ranks import end_by_error, ranks

ENDED = "its program has ended"


class Scene:
    """A pipeline over all ranks that has stepped once. While `bad`, its loss fails on the last rank."""

    def __init__(self, devices: Any = "world", **options: Any) -> None:
        torch.manual_seed(0)
        self.x, self.y = torch.randn(8, 8), torch.randn(8, 3)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.bad = False
        self.pipe = fxsplit.compile(
            self.model, devices, n_microbatches=2, loss_fn=self.compute_loss, example_inputs=self.x, **options
        )
        self.step()

    def compute_loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        if self.bad and dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("bad")
        return F.mse_loss(outputs, target)

    def step(self, **options: Any) -> float:
        return float(self.pipe.step(self.x, target=self.y, **options))

    def fail(self) -> None:
        """Take a step that fails on all ranks, so that the next call makes their groups again."""
        self.bad = True
        with pytest.raises(ValueError, match="bad"):
            self.step()
        self.bad = False


def end(how: str) -> None:
    """End this rank's program, as a script ends in a process of its own."""
    if how == "_exit":
        os._exit(0)
    if how == "raises":
        end_by_error(KeyError("lost"))
    else:
        _end_started()


def list_calls(scene: Scene, folder: str, saved: str) -> dict[str, Callable[[], object]]:
    """Return calls that ranks make together."""
    pipe, x = scene.pipe, scene.x
    early = pipe(x)
    again: dict[str, Any] = {"n_microbatches": 2, "loss_fn": F.mse_loss, "example_inputs": x}
    return {
        "step": scene.step,
        "step, limited": lambda: scene.step(timeout_s=60.0),
        "forward": lambda: pipe(x),
        "backward": lambda: early.sum().backward(),
        "evaluation": lambda: pipe.eval()(x),
        "stream": lambda: list(pipe.stream([x, x])),
        "trace": lambda: pipe.trace(x, target=scene.y),
        "save_checkpoint": lambda: fxsplit.save_checkpoint(folder, pipe, step=2),
        "load_checkpoint": lambda: fxsplit.load_checkpoint(saved, pipe),
        "state_dict": pipe.state_dict,
        "save_weights": lambda: pipe.save_weights(folder),
        "verify": lambda: fxsplit.verify(pipe, x),
        "norms": lambda: nn.utils.clip_grad_norm_(pipe.parameters(), 1.0),
        "compile again": lambda: fxsplit.compile(nn.Linear(8, 3), "world", **again).step(x, target=scene.y),
        "other ranks": lambda: join_world([[rank] for rank in range(dist.get_world_size())]),
    }


def call_after(rank: int, n: int, how: str, folder: str) -> dict[str, str]:
    """Return the error of every call after the last rank has left. No call waits for that rank."""
    scene = Scene()
    saved = str(fxsplit.save_checkpoint(folder, scene.pipe, step=1).wait())
    calls = list_calls(scene, folder, saved)
    if rank == n - 1:
        end(how)
        return {}
    found = {}
    for name, call in calls.items():
        with pytest.raises(RankError) as caught:
            call()
        found[name] = str(caught.value)
    scene.pipe.close()
    return found


@pytest.mark.parametrize(("n", "how"), [(2, "returns"), (2, "_exit"), (3, "raises")])
def test_every_call_says_that_a_rank_has_left(n: int, how: str, tmp_path: Any) -> None:
    told = {"returns": ", and it makes no more calls", "_exit": " without a message", "raises": " by KeyError: 'lost'"}[
        how
    ]
    dying = [1] if how == "_exit" else []
    *others, _ = ranks(n, call_after, how, str(tmp_path), dying=dying)
    for found in others:
        assert len(found) == 15
        for name, text in found.items():
            # The first call of all also is of the error's own type.
            first = name == "step" and text == f"rank {n - 1} of {n} has raised KeyError: 'lost'"
            assert first or text.startswith(f"rank {n - 1} of {n} has left: {ENDED}{told}"), (name, text)


def wait_limited(rank: int, n: int, fails: bool) -> list[str]:
    """Return rank 0's timeout, if the other rank comes after its limit, and whether both go on."""
    scene, store = Scene(), clone_store()
    if fails:
        scene.fail()
    if rank == 1:
        store.wait(["rank 0 has its error"])
    with pytest.raises(StepTimeout) as caught:
        scene.step(timeout_s=0.5)
    store.set("rank 0 has its error", "1")
    loss = scene.step()
    return [str(caught.value), f"{loss:.6f}"]


@pytest.mark.parametrize(
    ("fails", "waited"), [(False, "all ranks at step number 1"), (True, "all ranks to go on after a failure")]
)
def test_a_limit_holds_for_all_that_a_step_waits_for(fails: bool, waited: str) -> None:
    first, second = ranks(2, wait_limited, fails)
    assert first == second and first[0].startswith("rank 0 of 2 has raised StepTimeout: the step takes longer than 0.5")
    assert f"rank 0: waits for {waited}" in first[0] and "rank 1: does not answer" in first[0]


@contextmanager
def doing(rank: int, number: int, act: Callable[[], object]) -> Iterator[None]:
    """Let a rank do something when it begins to make its group of that number."""
    make, made = dist.new_group, list[int]()

    def make_or_act(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        if dist.get_rank() == rank and len(made) == number:
            act()
        return make(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", make_or_act)
        yield


def interrupt() -> None:
    raise KeyboardInterrupt


def make_groups_in_vain(rank: int, n: int, ends: bool) -> list[str]:
    """Return the errors if rank 0 is interrupted or killed while groups are made, in this call and the next."""
    scene = Scene()
    scene.fail()
    found = []
    with doing(0, 2, (lambda: os._exit(3)) if ends else interrupt):
        for _ in range(2):
            try:
                scene.step()
                found.append("well")
            except (KeyboardInterrupt, RankError) as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


def test_an_interrupt_in_the_middle_of_making_groups_reaches_all_ranks() -> None:
    first, second = ranks(2, make_groups_in_vain, False)
    assert first == ["KeyboardInterrupt: ", "well"]
    assert second[0].endswith("rank 0 of 2 has raised KeyboardInterrupt: KeyboardInterrupt") and second[1] == "well"


def test_a_rank_that_is_lost_in_the_middle_of_making_groups_is_named() -> None:
    code, found = ranks(2, make_groups_in_vain, True, dying=[0])
    assert code == 3 and all(f"rank 0 of 2 has left: {ENDED} without a message" in one for one in found), found


def end_before(rank: int, n: int) -> str:
    """Return the error of a first compile if another rank has ended before its own."""
    if rank == 1:
        os._exit(3)
    with pytest.raises(RankError) as caught:
        Scene()
    return str(caught.value)


def test_a_rank_that_has_left_before_the_first_compile_is_named() -> None:
    assert ranks(2, end_before, dying=[1])[0].startswith(f"rank 1 of 2 has left: {ENDED}")


def fork_and_go_on(rank: int, n: int) -> float:
    """Return the loss of a step after a process that was forked from this rank has ended."""
    scene = Scene()
    if (child := os.fork()) == 0:
        try:
            _end_started()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    dist.barrier()
    return scene.step()


def test_a_process_that_a_rank_has_forked_is_none() -> None:
    first, second = ranks(2, fork_and_go_on)
    assert first == second


def read_causes(rank: int, n: int) -> str:
    """Return the chain of errors of a step that fails on the other rank while this one waits for it."""
    scene, store = Scene(), clone_store()
    if rank == 1:
        store.wait(["rank 0 waits"])
        scene.pipe.compiler.compile_group.world.fail(KeyError("between calls"))  # type: ignore[union-attr]
        return ""
    store.set("rank 0 waits", "1")
    with pytest.raises(RankError) as caught:
        scene.step()
    chain: list[BaseException | None] = [caught.value]
    while chain[-1] is not None:
        chain.append(chain[-1].__cause__)
    return "\n".join(map(str, chain))


def test_a_wait_that_was_broken_off_does_not_say_that_its_time_was_over() -> None:
    chain = ranks(2, read_causes)[0]
    assert "has raised KeyError: 'between calls'" in chain and "has waited" not in chain, chain


def lose_while_adding(rank: int, n: int) -> str:
    """Return the error if a rank ends while ranks add up their hooks' compression errors."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    scene = Scene(mesh["dp", "pp"], gradient_hook="topk{share=0.3}")
    if rank == 1:
        reduction._get_left_out = lambda *_: os._exit(3)
    with pytest.raises(RankError) as caught:
        fxsplit.verify(scene.pipe, scene.x)
    return str(caught.value)


def test_a_rank_that_is_lost_while_left_out_gradients_are_added_is_named() -> None:
    assert ranks(2, lose_while_adding, dying=[1])[0].startswith(f"rank 1 of 2 has left: {ENDED}")
