"""Weights that several ranks read, and their gradients.

    rank 0 (owner)  ---- fetch: values ------->  rank 1 (copy)    before each batch
    rank 0 (owner)  <-- exchange: gradients ---  rank 1 (copy)    after it

A weight lives with the first stage that has it, on that stage's first device. Other ranks fetch copies before each
batch, and send the gradients back. The owner adds gradients in the order of the stages, as one process does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from fxsplit.ir.facts.stages import list_weights
from fxsplit.runtime.program import Program
from fxsplit.runtime.ranks.wire.gradient_messages import pack_gradient, unpack_gradients
from fxsplit.runtime.ranks.wire.layout import MessageLayout
from fxsplit.runtime.ranks.world.world import World
from fxsplit.torch_internals.autograd.sums import Share
from fxsplit.torch_internals.nn.batch_norm import DeferredBatchNorm, Statistics


class SharedWeights:
    """The weights of one program that are read by ranks other than their owner."""

    def __init__(self, program: Program, world: World) -> None:
        self._program = program
        self._world = world
        homes = program.homes
        owners = {key: homes[stage.index][0] for key, (_, stage) in program.list_owners().items()}
        self._held = [[(w, owners[id(w)]) for w in list_weights(stage.module)] for stage in program.stages.stages]
        # The weights that an owner sends to a device: (owner, device) -> [(stage, index among its weights)].
        self.copies: dict[tuple[int, int], list[tuple[int, int]]] = {}
        # The ranks that send gradients: (stage, one of its devices, owner of some of its weights).
        self.returns: set[tuple[int, int, int]] = set()
        for stage, held in enumerate(self._held):
            for number, (_, owner) in enumerate(held):
                for device in homes[stage]:
                    places = self.copies.setdefault((owner, device), [])
                    if owner != device and all(self._get(*p) is not self._get(stage, number) for p in places):
                        places.append((stage, number))
                self.returns |= {(stage, device, owner) for device in homes[stage] if device != owner}
        self.copies = {pair: places for pair, places in self.copies.items() if places}
        # Batch norms with replicas, which record statistics that the first replica writes: (stage, norm).
        self._noted = [
            (stage.index, module)
            for stage in program.stages.stages
            for module in stage.module.children()
            if isinstance(module, DeferredBatchNorm) and len(homes[stage.index]) > 1
        ]

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """The (sender, receiver) of every message that this class sends."""
        homes = self._program.homes
        notes = {(other, homes[stage][0]) for stage, _ in self._noted for other in homes[stage][1:]}
        return {*self.copies, *((device, owner) for _, device, owner in self.returns), *notes}

    def _get(self, stage: int, number: int) -> Tensor:
        """Return a weight as the model has it now: it may be replaced between calls."""
        return self._held[stage][number][0]

    def relink(self) -> None:
        """Look up the weights that the stages have now: the model's weights may have been replaced since."""
        for stage, held in enumerate(self._held):
            weights = list_weights(self._program.stages[stage].module)
            self._held[stage] = [(w, owner) for w, (_, owner) in zip(weights, held, strict=True)]

    def fetch(self) -> None:
        """Receive the values of weights that live on other ranks, and send other ranks the weights that live here."""
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

    def exchange(self, stage: int, replica: int, shares: Iterator[Share]) -> Iterable[Share]:
        """Return a replica's gradients of this rank's weights, and send the other gradients to their owners.

        Call it for all replicas of all stages in order, between `begin` and `finish`.
        """
        me, home = self._world.me, self._program.homes[stage][replica]
        # After a reduce, the first replica has the gradients of all replicas.
        if replica and self._reduced:
            return shares
        if home != me:
            if (stage, home, me) not in self.returns:
                return shares
            found = unpack_gradients(self.receive(home, f"gradients of stage {stage}"))
            return [(self._get(stage, number), gradient, True) for number, gradient in found]
        owner_of = {id(weight): (owner, number) for number, (weight, owner) in enumerate(self._held[stage])}
        away: dict[int, list[Any]] = {o: [] for s, d, o in self.returns if (s, d) == (stage, me)}
        own: list[Share] = []
        for share in shares:
            owner, number = owner_of.get(id(share[0]), (me, 0))
            if owner == me:
                own.append(share)
            else:
                away[owner] += pack_gradient(number, share[1])
        for owner, values in sorted(away.items()):
            self._works += self.send(owner, values)
        return own

    def gather_notes(self) -> None:
        """Send the batch statistics that replicas of a stage have computed to its first replica.

        The first replica adds them to its own, and later updates the running statistics of the batch norms.
        """
        me, works = self._world.me, []
        for stage, norm in self._noted:
            first, *others = self._program.homes[stage]
            if me in others:
                works += self.send(first, [value for m, call in norm.take_calls() for value in (m, *call)])
            elif me == first:
                for other in others:
                    norm.add_calls(_fold(self.receive(other, f"statistics of batch norms in stage {stage}")))
        for work, _ in works:
            self._world.wait(work, "a rank that is to read statistics of batch norms")

    def begin(self, *, reduced: bool) -> None:
        """Begin to exchange the gradients of a job.

        reduced: whether the replicas of each stage have already summed their gradients in the first replica.
        """
        self._reduced = reduced
        self._works: list[tuple[Any, Tensor]] = []

    def finish(self) -> None:
        """Wait until all gradients that were sent have been received."""
        for work, _ in self._works:
            self._world.wait(work, "a rank that is to read gradients")
        self._works.clear()

    def send(self, device: int, values: list[Any]) -> list[tuple[Any, Tensor]]:
        """Begin to send values and their layout to a rank.

        Returns (handle to wait for, tensor to keep until then) for each part.
        """
        layout = MessageLayout.describe(values, (), self._world.device)
        sent = self._world.send_text(layout.to_text(), device)
        pair = self._world.get_pair(self._world.me, device)
        return sent + [(pair.send(piece), piece) for piece in layout.pack(values, self._world.device)]

    def receive(self, source: int, what: str) -> list[Any]:
        """Wait for the values that a rank sends, and return them.

        what: names the values, for the error if they do not come.
        """
        what = f"rank {source}, which is to send {what}"
        layout = MessageLayout.parse(self._world.receive_text(source, partial(self._world.wait, what=what)))
        here = self._world.device
        pieces = layout.make_pieces(here)
        pair = self._world.get_pair(source, self._world.me)
        for work in [pair.receive(piece) for piece in pieces]:
            self._world.wait(work, what)
        return layout.unpack(pieces, here, gradients=False)


def _fold(values: list[Any]) -> list[tuple[int, Statistics]]:
    """Return the recorded calls of batch norms, each as (microbatch, statistics), from the flat list that was sent."""
    return [(values[i], (values[i + 1], values[i + 2], values[i + 3])) for i in range(0, len(values), 4)]
