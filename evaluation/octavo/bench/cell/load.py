"""Plays all replicas and frontends of a cell in one loop of one thread, which costs little beside the scheduler.

A replica's socket is read when its step has ended, not before, and frontends' a few hundred times a second: so there is
one send, one receive and one wait per step and no more.
"""

import heapq
import select
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

import zmq

from octavo.bench.cell.peers import FakeFrontend, FakeReplica, ReplicaTally, RequestLengths
from octavo.wire.requests import RENEW_INTERVAL_S
from octavo.wire.steps import HEARTBEAT_INTERVAL_S

_DRAIN_S: Final = 0.005
_WELCOME_S: Final = 20.0
_BLOCK_SIZE: Final = 16


@dataclass(frozen=True)
class Size:
    """Describes a cell. Each frontend has its share of the requests, which are as many as can run at once; replicas
    have blocks enough for all of them."""

    replicas: int
    sequences: int
    frontends: int
    step_s: float
    lengths: RequestLengths = field(default_factory=RequestLengths)

    @property
    def num_blocks(self) -> int:
        longest = self.lengths.prompt + self.lengths.longest
        return (self.sequences + 8) * (longest // _BLOCK_SIZE + 2)


@dataclass(frozen=True)
class Played:
    """Holds what the replicas and frontends of a cell counted in `wall_s` seconds."""

    wall_s: float
    tallies: list[ReplicaTally]
    messages: int
    message_bytes: int
    ended: int


class PlayedCell(ExitStack):
    """Plays all replicas and frontends of a cell. They are connected to the scheduler within the `with` block."""

    def __init__(self, size: Size, frontend_endpoint: str, worker_endpoint: str) -> None:
        super().__init__()
        context: zmq.Context[zmq.Socket[bytes]] = self.enter_context(zmq.Context())
        self._num_blocks = size.num_blocks
        self._replicas = [FakeReplica(context, worker_endpoint, i, size.step_s) for i in range(size.replicas)]
        shares = _shares(size.replicas * size.sequences, size.frontends)
        self._frontends = [
            FakeFrontend(context, frontend_endpoint, number, live, size.lengths) for number, live in enumerate(shares)
        ]
        for peer in (*self._replicas, *self._frontends):
            self.enter_context(peer.socket)
        self._chores = [
            _Chore(_DRAIN_S, self._drain),
            _Chore(HEARTBEAT_INTERVAL_S, self._beat),
            _Chore(RENEW_INTERVAL_S, self._renew),
        ]
        # Replicas at work, by the end of their step, and the others.
        self._busy: list[tuple[float, int]] = []
        self._idle = set(range(size.replicas))

    def begin(self) -> None:
        """Registers all, and submits all. Raises `RuntimeError` if the scheduler does not answer."""
        peers = (*self._replicas, *self._frontends)
        until = time.monotonic() + _WELCOME_S
        while any(peer.epoch is None for peer in peers):
            if time.monotonic() > until:
                raise RuntimeError("the scheduler welcomes nobody")
            self._turn()
        for frontend in self._frontends:
            frontend.fill()

    def play(self, seconds: float) -> Played:
        """Goes on for so long, and tells what happened meanwhile."""
        began = time.monotonic()
        for replica in self._replicas:
            replica.new_tally(began)
        for frontend in self._frontends:
            frontend.new_tally()
        while (now := time.monotonic()) < began + seconds:
            self._turn()
        tallies = [replica.end_tally(now) for replica in self._replicas]
        counts = zip(*((f.messages, f.message_bytes, f.ended) for f in self._frontends), strict=True)
        return Played(now - began, tallies, *map(sum, counts))

    def _turn(self) -> None:
        self._end_steps()
        self._begin_steps()
        now = time.monotonic()
        for chore in self._chores:
            chore.do_if_due(now)
        due_at = min(chore.due_at for chore in self._chores)
        if self._busy:
            due_at = min(due_at, self._busy[0][0])
        if (wait_s := due_at - time.monotonic()) > 0:
            select.select([self._replicas[number].socket for number in self._idle], [], [], wait_s)

    def _end_steps(self) -> None:
        while self._busy and self._busy[0][0] <= (now := time.monotonic()):
            _, number = heapq.heappop(self._busy)
            self._replicas[number].finish(now)
            self._place(number)

    def _begin_steps(self) -> None:
        for number in [n for n in self._idle if self._replicas[n].resume(time.monotonic())]:
            self._idle.discard(number)
            self._place(number)

    def _place(self, number: int) -> None:
        if (ends_at := self._replicas[number].ends_at) is None:
            self._idle.add(number)
        else:
            heapq.heappush(self._busy, (ends_at, number))

    def _drain(self) -> None:
        for frontend in self._frontends:
            frontend.drain()

    def _beat(self) -> None:
        for replica in self._replicas:
            replica.beat(self._num_blocks)

    def _renew(self) -> None:
        for frontend in self._frontends:
            frontend.beat()


class _Chore:
    """Repeats a call every `interval_s` seconds."""

    def __init__(self, interval_s: float, do: Callable[[], None]) -> None:
        self.due_at = time.monotonic()
        self._interval_s, self._do = interval_s, do

    def do_if_due(self, now: float) -> None:
        if now >= self.due_at:
            self.due_at = now + self._interval_s
            self._do()


def _shares(whole: int, parts: int) -> list[int]:
    return [whole // parts + (number < whole % parts) for number in range(parts)]
