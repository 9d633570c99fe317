"""Ties: weights that several ranks read, and their gradients.

A weight lives with the first stage that has it, on that stage's first device. Other ranks have copies, which they fetch
before each batch, and send the gradients back. The owner adds them in the order of the stages, as one process does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fxsplit.ir.facts.stages import list_weights
from fxsplit.runtime.program import Program
from fxsplit.runtime.ranks.layout import Layout
from fxsplit.runtime.ranks.sums import pack_gradient, unpack_gradients
from fxsplit.runtime.ranks.world import World
from fxsplit.torch_internals.grad_sums import Share


class Ties:
    """The weights of one program that are read on other ranks than their own."""

    def __init__(self, program: Program, world: World) -> None:
        self._program = program
        self._world = world
        homes = program.homes
        owners = {key: homes[stage.index][0] for key, (_, stage) in program.list_owners().items()}
        self._held = [[(w, owners[id(w)]) for w in list_weights(stage.module)] for stage in program.stages.stages]
        # Which weights go from an owner to another device, as places in stages: (owner, device) -> (stage, number).
        self.copies: dict[tuple[int, int], list[tuple[int, int]]] = {}
        # Which stages send gradients to an owner: (stage, owner) -> numbers of weights.
        self.returns: dict[tuple[int, int], list[int]] = {}
        for stage, held in enumerate(self._held):
            for number, (_, owner) in enumerate(held):
                for device in homes[stage]:
                    places = self.copies.setdefault((owner, device), [])
                    if owner != device and all(self._get(*p) is not self._get(stage, number) for p in places):
                        places.append((stage, number))
                if owner != homes[stage][0]:
                    self.returns.setdefault((stage, owner), []).append(number)
        self.copies = {pair: places for pair, places in self.copies.items() if places}

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """The (sender, receiver) of all that is sent."""
        homes = self._program.homes
        return {*self.copies, *((homes[stage][0], owner) for stage, owner in self.returns)}

    def _get(self, stage: int, number: int) -> Tensor:
        """Return a weight as the model has it now: it may be replaced between calls."""
        return self._held[stage][number][0]

    def relink(self) -> None:
        """Look at the weights that stages have now."""
        for stage, held in enumerate(self._held):
            weights = list_weights(self._program.stages[stage].module)
            self._held[stage] = [(w, owner) for w, (_, owner) in zip(weights, held, strict=True)]

    def fetch(self) -> None:
        """Bring the values of weights that live on other ranks here, and send them those that live here."""
        if not self.copies:
            return
        self.relink()
        me, works = self._world.me, []
        self._program.fetched.clear()
        for (owner, device), places in sorted(self.copies.items()):
            if owner == me:
                works += self.send(device, [self._get(*place).detach() for place in places])
            elif device == me:
                for place, value in zip(places, self.receive(owner, "its weights"), strict=True):
                    self._program.fetched[id(self._get(*place))] = value
        for work, _ in works:
            self._world.wait(work, "a rank that is to read weights")

    def exchange(self, stage: int, shares: Iterator[Share]) -> Iterable[Share]:
        """Return what a stage adds to the gradients of this rank's weights; send what it adds to those of others.

        To be called for all stages in order, and finished with `finish`.
        """
        me, home = self._world.me, self._program.homes[stage][0]
        if home != me:
            if (stage, me) not in self.returns or stage in self._seen:
                return shares
            self._seen.add(stage)
            found = unpack_gradients(self.receive(home, f"gradients of stage {stage}"))
            return [(self._get(stage, number), gradient, True) for number, gradient in found]
        own: list[Share] = []
        owner_of = {id(weight): (owner, number) for number, (weight, owner) in enumerate(self._held[stage])}
        away: dict[int, list[Any]] = {o: [] for s, o in self.returns if s == stage}
        for share in shares:
            owner, number = owner_of.get(id(share[0]), (me, 0))
            if owner == me:
                own.append(share)
            else:
                away[owner] += pack_gradient(number, share[1])
        if stage not in self._seen:
            self._seen.add(stage)
            for owner, values in sorted(away.items()):
                self._works += self.send(owner, values)
        return own

    def begin(self) -> None:
        """Begin to exchange the gradients of a step."""
        self._seen: set[int] = set()
        self._works: list[tuple[Any, Tensor]] = []

    def finish(self) -> None:
        """Wait until all gradients that were sent have been read."""
        for work, _ in self._works:
            self._world.wait(work, "a rank that is to read gradients")
        self._works.clear()

    def send(self, device: int, values: list[Any]) -> list[tuple[Any, Tensor]]:
        """Begin to send values with their layout; return what to wait for."""
        layout = Layout.describe(values, (), self._world.device)
        text = torch.frombuffer(bytearray(layout.to_text().encode()), dtype=torch.uint8)
        length = torch.tensor([len(text)])
        sent = [(self._world.send_host(t, device), t) for t in (length, text)]
        pair = self._world.get_pair(self._world.me, device)
        return sent + [(pair.send(piece), piece) for piece in layout.pack(values, self._world.device)]

    def receive(self, source: int, what: str) -> list[Any]:
        """Return the values that a rank sends."""
        what = f"rank {source}, which is to send {what}"
        length = torch.empty(1, dtype=torch.int64)
        self._world.wait(self._world.receive_host(length, source), what)
        text = torch.empty(int(length), dtype=torch.uint8)
        self._world.wait(self._world.receive_host(text, source), what)
        layout = Layout.parse(text.numpy().tobytes().decode())
        here = self._world.device
        pieces = [torch.empty(size, dtype=torch.uint8, device=here) for size in layout.pieces]
        pair = self._world.get_pair(source, self._world.me)
        for work in [pair.receive(piece) for piece in pieces]:
            self._world.wait(work, what)
        return layout.unpack(pieces, here, gradients=False)
