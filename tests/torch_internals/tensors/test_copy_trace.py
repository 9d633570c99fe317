"""Functions that join, cut and transpose tensors: filling in the traced parts gives the function's results."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fxsplit.torch_internals.tensors.copy_trace import fits, trace_copies

Read = Callable[[str], Tensor]
SHAPE = (4, 6)


def fill(make: Callable[[Read], dict[str, Tensor]], sources: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """Return the results of `make`, filled in part by part, or None if they cannot be traced."""
    kinds = {name: value.to("meta") for name, value in sources.items()}
    made, parts = trace_copies(make, kinds)
    if parts is None or not all(fits(parts[name], kinds, made[name]) for name in made):
        return None
    filled = {name: torch.full(value.shape, float("nan")) for name, value in made.items()}
    for name, target in filled.items():
        for part in parts[name]:
            part.place(target).copy_(part.take(sources[part.source]))
    return filled


def check(make: Callable[[Read], dict[str, Tensor]], count: int = 3) -> None:
    sources = {f"s{i}": torch.rand(SHAPE) for i in range(count)}
    filled, wanted = fill(make, sources), make(sources.__getitem__)
    assert filled is not None and filled.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(filled[name], value), name


def read_all(read: Read) -> list[Tensor]:
    return [read(f"s{i}") for i in range(3)]


JOINS: dict[str, Callable[[Read], Tensor]] = {
    "a stack": lambda read: torch.stack(read_all(read)),
    "a stack in the middle": lambda read: torch.stack(read_all(read), dim=-2),
    "experts": lambda read: torch.cat([torch.stack(read_all(read)), torch.stack(read_all(read)[::-1])], dim=1),
    "negative": lambda read: torch.cat(read_all(read), dim=-1),
    "turned": lambda read: torch.cat([t.T for t in read_all(read)]).contiguous(),
    "turned later": lambda read: torch.stack(read_all(read)).transpose(1, 2).contiguous(),
    "permuted": lambda read: torch.stack(read_all(read)).permute(2, 0, -2).contiguous(),
    "reshaped": lambda read: torch.stack(read_all(read)).reshape(12, 6),
    "reshaped while turned": lambda read: read("s0").T.reshape(8, 3),
    "squeezed": lambda read: torch.cat([t[None] for t in read_all(read)]).unsqueeze(-1).squeeze(-1),
    "cut and joined": lambda read: torch.cat([part for t in read_all(read) for part in t.chunk(2)[::-1]]),
    "a row each": lambda read: torch.stack([t[1] for t in read_all(read)]),
    "unbound": lambda read: torch.stack([row for t in read_all(read) for row in t.unbind(1)]),
    "with nothing": lambda read: torch.cat([torch.cat(read_all(read)), read("s1")[:0]]),
    "the same twice": lambda read: torch.cat([read("s0"), read("s0")]),
}


@pytest.mark.parametrize("name", JOINS)
def test_a_join_is_told_part_by_part(name: str) -> None:
    check(lambda read: {"w": JOINS[name](read)})


def test_one_source_may_be_parts_of_several_results() -> None:
    check(lambda read: {"a": read("s0")[:2].clone(), "b": torch.cat([read("s0")[2:], read("s1")])})


def make_randomly(seed: int, read: Read) -> dict[str, Tensor]:
    """Return the results of a random program of known operators."""
    draw = random.Random(seed)
    held = read_all(read)
    for _ in range(draw.randrange(1, 7)):
        x = held.pop(draw.randrange(len(held)))
        dim = draw.randrange(-x.ndim, x.ndim)
        kind = draw.choice(("turn", "cut", "join", "flat", "copy", "wider"))
        if kind == "turn":
            held.append(x.transpose(dim, draw.randrange(x.ndim)))
        elif kind == "cut":
            held += list(x.chunk(2, dim=dim))
        elif kind == "join":
            held.append(draw.choice((torch.cat, torch.stack))([x, x.clone()], dim))
        else:
            held.append({"flat": x.flatten(), "copy": x.contiguous(), "wider": x.unsqueeze(dim)}[kind])
    return {str(i): x.contiguous() for i, x in enumerate(held)}


def test_random_programs() -> None:
    """Some programs cannot be traced, for example if a concatenated tensor is cut."""
    told = 0
    for seed in range(150):
        sources = {f"s{i}": torch.rand(SHAPE) for i in range(3)}
        filled, wanted = fill(partial(make_randomly, seed), sources), make_randomly(seed, sources.__getitem__)
        told += filled is not None
        for name, value in wanted.items() if filled else ():
            assert filled is not None and torch.equal(filled[name], value), (seed, name)
    assert told > 100


ODD: dict[str, Callable[[Read], Any]] = {
    "computes": lambda read: read("s0") * 2,
    "joins what is computed": lambda read: torch.stack([read("s0"), read("s1") + 1]),
    "writes": lambda read: read("s0").mul_(2),
    "writes to a part": lambda read: torch.stack([read("s0"), read("s1")[0].zero_().expand(4, 6)]),
    "writes through a view": lambda read: (read("s0")[0].zero_(), torch.stack([read("s0"), read("s1")]))[1],
    "fills by hand": lambda read: torch.empty(4, 6, device=read("s0").device).copy_(read("s0")),
    "casts": lambda read: torch.stack([read("s0").double(), read("s1").double()]),
    "cuts what is joined": lambda read: torch.stack(read_all(read))[:, 1:3].contiguous(),
    "makes anew": lambda read: torch.zeros(4, 6, device=read("s0").device),
    "repeats": lambda read: read("s0").repeat(2, 1),
}


@pytest.mark.parametrize("name", ODD)
def test_what_does_more_than_copy_is_not_told_in_parts(name: str) -> None:
    sources = {f"s{i}": torch.rand(SHAPE) for i in range(3)}
    assert fill(lambda read: {"w": ODD[name](read)}, sources) is None


def test_one_result_that_is_not_told_spoils_the_others() -> None:
    assert fill(lambda read: {"a": read("s0"), "b": read("s1") * 2}, {n: torch.rand(3) for n in ("s0", "s1")}) is None


def test_a_weight_with_strides_that_no_view_can_follow() -> None:
    """A reshaped result is a view of contiguous memory, and may be none of a weight that is transposed in memory."""
    kinds = {f"s{i}": torch.empty(SHAPE, device="meta") for i in range(3)}
    made, parts = trace_copies(lambda read: {"w": torch.stack(read_all(read)).reshape(3, 2, 2, 6)}, kinds)
    assert parts is not None and fits(parts["w"], kinds, made["w"])
    assert not fits(parts["w"], kinds, made["w"].transpose(1, 2))
