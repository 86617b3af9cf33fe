"""The wires between places and the scheduler: in order like TCP where nothing is wrong, and all that can go wrong."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from random import Random

import zmq

from octavo.testing.simulation.clock import Action, Clock, Process
from octavo.testing.simulation.trace import Trace

_RECONNECT_S = (0.05, 0.5)
_NOTICED_S = 0.2
_NORMAL_DELAY_S = 0.002
_SILENCE_S = (6.0, 8.0)
_OVERTAKEN_S = 3.0

Deliver = Callable[[bytes], None]


def silence(random: Random) -> float:
    """Seconds until the library's heartbeats take a silent connection for lost."""
    return random.uniform(*_SILENCE_S)


@dataclass
class Noise:
    """What happens to single messages beyond anything TCP does, as probabilities."""

    loss: float = 0.0
    doubling: float = 0.0
    overtaking: float = 0.0


class Direction:
    """One way over a link. `delay`: seconds that a message takes at most."""

    def __init__(self, network: "Network", name: str) -> None:
        self.delay = _NORMAL_DELAY_S
        self.noise: Noise | None = None
        self._cut_until = 0.0
        # What arrives during a cut waits for its end, as what TCP sends again does.
        self._held: list[Action] = []
        self._network = network
        self._name = name
        self._last_arrival = 0.0

    def carry(self, connection: "Connection", frame: bytes, deliver: Deliver) -> None:
        """Sends a message over a connection."""
        network = self._network
        network.trace.note(network.clock.now, self._name, frame)
        arrive = partial(self._arrive, connection, frame, deliver)
        for delay in (0.0,) if self.noise is None else self._disturb(self.noise):
            arrival = network.clock.now + network.random.random() * self.delay
            if not delay:
                arrival = self._last_arrival = max(arrival, self._last_arrival)
            network.clock.at(arrival + delay, arrive)

    @property
    def is_cut(self) -> bool:
        return self._cut_until > self._network.clock.now

    def cut(self, seconds: float) -> None:
        """Nothing gets through for so long."""
        self._cut_until = max(self._cut_until, self._network.clock.now + seconds)
        self._network.clock.at(self._cut_until, self._mend)

    def calm_down(self) -> None:
        """Back to normal delays, and no noise."""
        self.delay, self.noise = _NORMAL_DELAY_S, None

    def _disturb(self, noise: Noise) -> list[float]:
        """The extra delays with which a message's copies arrive."""
        happens = self._network.happens
        num_copies = 1 - happens("message lost", noise.loss) + happens("message doubled", noise.doubling)
        return [
            self._network.random.uniform(0, _OVERTAKEN_S) if happens("message overtaken", noise.overtaking) else 0.0
            for _ in range(num_copies)
        ]

    def _arrive(self, connection: "Connection", frame: bytes, deliver: Deliver) -> None:
        if self.is_cut:
            self._held.append(partial(self._arrive, connection, frame, deliver))
        elif not connection.lost:
            deliver(frame)

    def _mend(self) -> None:
        held, self._held = self._held, []
        for arrive in held:
            arrive()


class Link:
    """The wire between a place, whoever lives there, and the scheduler. `was_noisy`: its messages were not always those
    of TCP."""

    def __init__(self, network: "Network", place: str) -> None:
        self.up = Direction(network, f"{place} ->")
        self.down = Direction(network, f"-> {place}")
        self.was_noisy = False

    @property
    def directions(self) -> tuple[Direction, Direction]:
        return self.up, self.down

    @property
    def is_cut(self) -> bool:
        return self.up.is_cut or self.down.is_cut


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
        """Whatever is on its way is lost. What had arrived will be read."""
        if not self.lost:
            self.lost = True
            self._router.connections.pop(self.name, None)
            self._dealer.disconnected(self)


class Router:
    """The scheduler's end, with what its shell uses of a ROUTER socket."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.connections: dict[bytes, Connection] = {}
        self._inbox: deque[list[bytes]] = deque()

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        if not self._inbox:
            raise zmq.Again
        return self._inbox.popleft()

    def send_multipart(self, frames: list[bytes], flags: int = 0) -> None:
        connection = self.connections.get(frames[0])
        if connection is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        connection.send_down(frames[1])

    def deliver(self, name: bytes, frame: bytes) -> None:
        self._inbox.append([name, frame])
        self.process.wake()

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
        """Whether there is something to receive."""
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
        """The connection breaks."""
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
        """Whether it happens this time, which is counted."""
        happened = self.random.random() < probability
        self.counts[what] += happened
        return happened

    def new_name(self) -> bytes:
        """Of a new connection, as ROUTER sockets draw them."""
        return b"\0" + next(self._names).to_bytes(4, "big")
