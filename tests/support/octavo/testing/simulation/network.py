"""Connections over the links between places and the scheduler, and the sockets at both ends."""

from collections import Counter, deque
from functools import partial
from itertools import count
from random import Random

import zmq

from octavo.testing.simulation.clock import Clock, Process
from octavo.testing.simulation.links import Link
from octavo.testing.simulation.trace import Trace

_RECONNECT_S = (0.05, 0.5)
_NOTICED_S = 0.2
_KNOWN_S = 0.01


class Connection:
    """One connection over a link, known to the scheduler's end by its name."""

    def __init__(self, name: bytes, link: Link, router: "Router", dealer: "Dealer") -> None:
        self.name = name
        self.lost = False
        self._link = link
        self._router = router
        self._dealer = dealer
        router.connections[name] = self

    def send_up(self, frame: bytes) -> None:
        self._link.up.carry(self, frame, lambda frame: self._router.deliver(self.name, frame))

    def send_down(self, frame: bytes) -> None:
        self._link.down.carry(self, frame, self._dealer.deliver)

    def lose(self) -> None:
        """Loses whatever is on its way. What had arrived will be read."""
        if not self.lost:
            self.lost = True
            self._router.disconnected(self)
            self._dealer.disconnected(self)


class Router:
    """The scheduler's end, with what its shell uses of a ROUTER socket, and of the wakeup that rings when a connection
    ends."""

    def __init__(self, process: Process, random: Random) -> None:
        self.process = process
        self.connections: dict[bytes, Connection] = {}
        self._random = random
        self._has_rung = False
        # Frames, of messages of two each.
        self._inbox: deque[zmq.Frame] = deque()
        self._addressee = b""

    def getsockopt(self, option: int) -> int:
        assert option == zmq.EVENTS
        return int(zmq.POLLIN) if self._inbox else 0

    def recv(self, flags: int, *, copy: bool) -> zmq.Frame:
        return self._inbox.popleft()

    def send(self, frame: bytes, flags: int) -> None:
        if not flags & zmq.SNDMORE:
            self.connections[self._addressee].send_down(frame)
        elif frame not in self.connections:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        else:
            self._addressee = frame

    def deliver(self, name: bytes, frame: bytes) -> None:
        first = zmq.Frame(name)
        first.more = True
        self._inbox += first, zmq.Frame(frame)
        self.process.wake()

    def disconnected(self, connection: Connection) -> None:
        """The connection is lost: the wakeup may ring a little before the socket knows of it."""
        clock = self.process.clock
        clock.after(self._random.choice((0.0, _KNOWN_S)), partial(self._forget, connection))
        self._has_rung = True
        self.process.wake()

    def _forget(self, connection: Connection) -> None:
        self.connections.pop(connection.name, None)

    def heard(self) -> bool:
        """Tells whether the wakeup has rung since the last call."""
        heard, self._has_rung = self._has_rung, False
        return heard

    def close(self) -> None:
        for connection in list(self.connections.values()):
            connection.lose()


class Dealer:
    """The end of a frontend or worker, with what its shell uses of a DEALER socket that sends only when connected."""

    def __init__(self, network: "Network", wire: str, place: str, process: Process) -> None:
        self._network = network
        self._wire = wire
        self._link = network.link(place)
        self._process = process
        self._connection: Connection | None = None
        self._inbox: deque[bytes] = deque()
        self._outbox: deque[bytes] = deque()
        self._connect()

    @property
    def has_arrived(self) -> bool:
        """Tells whether there is something to receive."""
        return bool(self._inbox)

    def send(self, frame: bytes, flags: int = 0) -> None:
        """Raises `zmq.Again` while there is no connection. A process that works sends when it is done."""
        if self._connection is None:
            raise zmq.Again
        self._outbox.append(frame)
        if self._process.local_now > self._network.clock.now:
            self._process.run_at(self._process.local_now, self._flush)
        else:
            self._flush()

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        if not self._inbox:
            raise zmq.Again
        return [self._inbox.popleft()]

    def setsockopt(self, option: int, value: int) -> None:
        """Nothing lingers here: what was sent is on its way."""

    def deliver(self, frame: bytes) -> None:
        self._inbox.append(frame)
        self._process.wake()

    def disconnected(self, connection: Connection) -> None:
        """The connection is lost, which is noticed a little later."""
        self._network.counts["connection lost"] += 1
        noticed_at = self._network.clock.now + self._network.random.uniform(0, _NOTICED_S)
        self._process.run_at(noticed_at, self._forget_connection)

    def _forget_connection(self) -> None:
        if self._connection is not None and self._connection.lost:
            self._connection = None
            self._outbox.clear()
            self._try_again()

    def reset(self) -> None:
        """Breaks the connection."""
        if self._connection is not None:
            self._connection.lose()

    def _flush(self) -> None:
        if self._connection is not None and self._outbox:
            self._connection.send_up(self._outbox.popleft())

    def _connect(self) -> None:
        router = self._network.routers.get(self._wire)
        if router is None or self._link.is_cut:
            self._try_again()
        else:
            self._connection = Connection(self._network.new_name(), self._link, router, self)

    def _try_again(self) -> None:
        delay = self._network.random.uniform(*_RECONNECT_S)
        self._process.run_at(self._network.clock.now + delay, self._connect)


class Network:
    """All links, by place, and the scheduler's ends, by wire. `counts` is for what happens to messages."""

    def __init__(self, clock: Clock, random: Random, trace: Trace, counts: Counter[str]) -> None:
        self.clock = clock
        self.random = random
        self.trace = trace
        self.counts = counts
        self.routers: dict[str, Router] = {}
        self.links: dict[str, Link] = {}
        self._names = count(1)

    def link(self, place: str) -> Link:
        if place not in self.links:
            self.links[place] = Link(self, place)
        return self.links[place]

    def happens(self, what: str, probability: float) -> bool:
        """Draws whether something happens this time, and counts it."""
        happened = self.random.random() < probability
        self.counts[what] += happened
        return happened

    def new_name(self) -> bytes:
        """Makes the name of a new connection, as ROUTER sockets draw them."""
        return b"\0" + next(self._names).to_bytes(4, "big")
