"""The channels of a rank's jobs. Messages to other ranks go over process groups; messages to the rank itself stay here.

    message = block (all small values and numbers) + each large tensor by itself
    first job of a key:   layout as text, then the pieces      later jobs:   only the pieces

Both ends must know a message's layout. In the first job of a *key*, the sender sends the layout before each message,
and later jobs reuse it. A key stands for everything that the shapes of values depend on. Messages between two ranks
have no
numbers: they are received in the order of the sender's row of the schedule, as NCCL requires.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from fxsplit.errors import RankError
from fxsplit.runtime.job.channels import JobStopped, Message
from fxsplit.runtime.ranks.wire.gradient_messages import SumsCodec
from fxsplit.runtime.ranks.wire.layout import MessageLayout
from fxsplit.runtime.ranks.wire.routes import Route, find_routes
from fxsplit.runtime.ranks.world.world import World
from fxsplit.schedule.action import BACKWARD, FORWARD, REDUCE, Action
from fxsplit.schedule.schedule import Schedule
from fxsplit.torch_internals.tensors import accelerators

WINDOW = 2
"""How many messages of each sender are received ahead of their use."""
MOST_KEYS = 500
"""How many keys' layouts are kept; the oldest are dropped first."""


class Awaited(NamedTuple):
    """The message that a rank waits for, in words for an error.

    source: the rank that sends the message. None if this rank waits until its own message has been read.
    action: the action that the message is for.
    """

    source: int | None
    action: Action

    def __str__(self) -> str:
        # Built only on demand: a rank waits for every message.
        if self.source is None:
            return f"the rank that is to read what was sent to {self.action}"
        return f"rank {self.source}, which is to send {self.action}"


class PostedReceive(NamedTuple):
    """A message that is being received: its layout, its pieces, and handles to wait for."""

    layout: MessageLayout
    pieces: list[Tensor]
    works: list[Any]


class RankChannels:
    """The channels of one pipeline on one rank. `open` begins a job, and `close` ends a job that has succeeded.

    codec: turns sums of gradients into messages, for stages with replicas.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._me = world.me
        self._on_host = not accelerators.is_accelerator(world.device)
        self._layouts: dict[Hashable, dict[Action, MessageLayout]] = {}
        self._epoch = world.epoch
        self.codec = SumsCodec()
        # Keep the schedule itself: a new object could have the id of one that is gone.
        self._routes: dict[int, tuple[Schedule, Route]] = {}
        self._reset({})

    def _reset(self, known: dict[Action, MessageLayout]) -> None:
        """Forget the previous job. `known`: the layouts of messages that the next job knows already."""
        self._known = known
        self._told = False
        self._failed = False
        self._local: dict[Action, Message] = {}
        self._route = Route({}, {}, {})
        self._ahead: dict[int, deque[Action]] = {}
        self._posted: dict[Action, PostedReceive] = {}
        self._sent: deque[tuple[Action, list[tuple[Any, Tensor]]]] = deque()
        self._arrived: set[Action] = set()
        self._unproven: dict[int, list[Action]] = {}

    def open(self, key: Hashable, schedule: Schedule) -> None:
        """Begin a job of a schedule.

        Jobs with equal keys send messages of equal layouts, so known layouts are not sent again.
        """
        # After a failure ranks have stopped at different points of the job: layouts may be known on one end only.
        if self._epoch != self.world.epoch:
            self._epoch = self.world.epoch
            self._layouts.clear()
        self._reset(self._layouts.get(key, {}))
        self._key = key
        # Both ends know the layouts or neither does, since every rank has run the same jobs.
        self._told = key in self._layouts
        self._route = self._find_route(schedule)
        self._ahead = {source: deque(actions) for source, actions in self._route.incoming.items()}
        if self._told:
            for source in self._ahead:
                for _ in range(WINDOW):
                    self._post_ahead(source)

    def close(self) -> None:
        """End a job that has run all its actions: wait for its messages, and keep its layouts for later jobs."""
        while self._sent:
            self._finish_oldest()
        if self._key not in self._layouts:
            self._layouts[self._key] = self._known
            for old in list(self._layouts)[:-MOST_KEYS]:
                del self._layouts[old]
        self._reset({})

    def give_up(self) -> None:
        """Forget the messages of a job that has failed on some rank."""
        self._reset({})

    def _find_route(self, schedule: Schedule) -> Route:
        """Return the messages that this rank receives in a schedule. They are found once and then kept."""
        known = self._routes.get(id(schedule))
        if known is None:
            known = self._routes[id(schedule)] = schedule, find_routes(schedule, self._me)
        return known[1]

    # Calls of a job

    def send(self, device: int, message: Message) -> None:
        """Send a message. Its values are read later, so they must not change before the job ends."""
        if self._failed:
            raise JobStopped
        if device == self._me:
            self._local[message.action] = message
            return
        action = message.action
        values, wanted = message.values, message.about
        if action.op == REDUCE:
            values, wanted = self.codec.pack(values[0], action), ()
        layout = self._known.get(action)
        # Sums may have other leaves each time, and sparse sums other lengths.
        if not self._told or action.op == REDUCE or layout is None:
            like = self._known.get(Action(action.stage + 1, FORWARD, action.microbatch))
            gradients = action.op == BACKWARD
            layout = MessageLayout.describe(values, wanted, self.world.device, like if gradients else None)
            self._known[action] = layout
            self._tell(layout, device, action)
        pair = self.world.get_pair(self._me, device)
        pieces = layout.pack(values, self.world.device)
        self._sent.append((action, [(pair.send(piece), piece) for piece in pieces]))

    def receive(self, device: int, action: Action) -> Message:
        """Wait for the message for an action, and return it. Raises RankTimeout or RankError if it does not come."""
        if action in self._local:
            return self._local.pop(action)
        if self._failed:
            raise JobStopped
        source = self._route.source_of[action]
        while action not in self._posted:
            self._post(source)
        layout, pieces, works = self._posted.pop(action)
        what = Awaited(source, action)
        for work in works:
            self._wait(work, what)
        self._post_ahead(source)
        # A message without bytes (gradients that nobody wants) arrives before its sender has done anything.
        self._release(source, action, came=bool(works) or not self._told)
        values = layout.unpack(pieces, self.world.device, gradients=action.op == BACKWARD)
        if action.op == REDUCE:
            return Message(action, [self.codec.unpack(values, action)], None)
        return Message(action, values, None, layout.wanted if action.op == FORWARD else ())

    def fail(self) -> None:
        """Make all further sends and receives of the job raise JobStopped."""
        self._failed = True

    # Helpers

    def _tell(self, layout: MessageLayout, device: int, action: Action) -> None:
        """Send the layout of the next message."""
        self._sent.append((action, self.world.send_text(layout.to_text(), device)))

    def _listen(self, source: int, action: Action) -> MessageLayout:
        """Receive the layout of the next message."""
        what = f"rank {source}, which is to say what it sends to {action}"
        return MessageLayout.parse(self.world.receive_text(source, partial(self._wait, what=what)))

    def _post_ahead(self, source: int) -> None:
        """Begin to receive a sender's next message before it is needed, if the layout of the message is known."""
        if self._told and self._ahead[source] and self._ahead[source][0].op != REDUCE:
            self._post(source)

    def _post(self, source: int) -> None:
        """Begin to receive a sender's next message. Messages are received in the order in which they are sent."""
        action = self._ahead[source].popleft()
        if not self._told or action.op == REDUCE:
            self._known[action] = self._listen(source, action)
        layout = self._known[action]
        pair, here = self.world.get_pair(source, self._me), self.world.device
        pieces = layout.make_pieces(here)
        self._posted[action] = PostedReceive(layout, pieces, [pair.receive(piece) for piece in pieces])

    def _release(self, source: int, action: Action, *, came: bool) -> None:
        """Free the messages that `source` must have read before it sent the message for `action`.

        came: whether a message with bytes has arrived. Otherwise nothing shows yet that `source` has read them.
        """
        read = self._unproven.setdefault(source, [])
        read += self._route.read_before.get(action, ())
        if not came:
            return
        self._arrived.update(read)
        read.clear()
        while self._sent and self._sent[0][0] in self._arrived:
            # On a CPU, a message that was read has been sent. On an accelerator, only a wait frees the memory.
            if self._on_host:
                self._sent.popleft()
            else:
                self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Wait until the oldest message that was sent has been read."""
        action, parts = self._sent.popleft()
        for work, _ in parts:
            self._wait(work, Awaited(None, action))

    def _wait(self, work: Any, what: object) -> None:
        """Wait for an operation. If it fails, the job's later sends and receives raise JobStopped."""
        try:
            self.world.wait(work, what)
        except RankError:
            self._failed = True
            raise
