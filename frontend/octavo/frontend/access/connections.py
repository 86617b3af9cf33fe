"""Who has how many connections, against whom they count, and how many this process may have open."""

import ipaddress
import logging
import resource
from collections.abc import Callable, Iterable
from typing import Final

# Of an IPv6 address: what one client is given, with all addresses below it.
_PREFIX = 64


def client_of(address: object) -> str:
    """The client behind a socket's or a call's address (host, port): one host, or one network of IPv6. Empty where
    there is none, as on a unix socket."""
    if not isinstance(address, tuple | list) or not address:
        return ""
    host = str(address[0]).partition("%")[0]
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(found, ipaddress.IPv6Address):
        mapped = found.ipv4_mapped
        return str(mapped or ipaddress.ip_network((found, _PREFIX), strict=False))
    return str(found)


# Who has how many connections: where there are too many, those that nobody needs are closed, the longest idle first,
# of the client that has most. So no client, however many it opens, keeps another out.


class Place:
    """One connection, of `client`. It is idle, while nothing is asked over it that is to be answered, from the start.
    `close` ends it; whoever can do so better than before may put that there."""

    def __init__(self, book: "ConnectionBook", client: str, close: Callable[[], None]) -> None:
        self.client = client
        self.close = close
        self._book = book

    def set_busy(self) -> None:
        """Something is to be answered."""
        self._book.set_busy(self)

    def set_idle(self) -> None:
        """All is answered, as of now."""
        self._book.set_idle(self)

    def leave(self) -> None:
        """It has ended. Idempotent."""
        self._book.remove(self)


class _Client:
    """Connections of one: those that are idle, the longest idle first."""

    def __init__(self) -> None:
        self.idle: dict[Place, None] = {}
        self.busy: set[Place] = set()

    def __len__(self) -> int:
        return len(self.idle) + len(self.busy)


class ConnectionBook:
    """Of one door. Belongs to one event loop. One client has half of the connections at most; what comes by a unix
    socket is of no client."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self._max_of_one = max(1, max_connections // 2)
        self._clients: dict[str, _Client] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def enter(self, client: str, close: Callable[[], None]) -> Place | None:
        """A connection that has come; None where there is no room for it, since all others are busy."""
        if client and len(self._clients.get(client, ())) >= self._max_of_one:
            if not self._close_one([self._clients[client]]):
                return None
        elif self._count >= self.max_connections and not self._close_one(self._clients.values()):
            return None
        place = Place(self, client, close)
        self._clients.setdefault(client, _Client()).idle[place] = None
        self._count += 1
        return place

    def set_busy(self, place: Place) -> None:
        """See `Place`, as for the following."""
        if (client := self._clients.get(place.client)) and place in client.idle:
            del client.idle[place]
            client.busy.add(place)

    def set_idle(self, place: Place) -> None:
        if (client := self._clients.get(place.client)) and place in client.busy:
            client.busy.discard(place)
            client.idle[place] = None

    def remove(self, place: Place) -> None:
        client = self._clients.get(place.client)
        if client is None or (place not in client.idle and place not in client.busy):
            return
        client.idle.pop(place, None)
        client.busy.discard(place)
        self._count -= 1
        if not client:
            del self._clients[place.client]

    def _close_one(self, clients: Iterable[_Client]) -> bool:
        """Closes the longest idle of whoever has most; whether there was one."""
        most = max((client for client in clients if client.idle), key=len, default=None)
        if most is None:
            return False
        place = next(iter(most.idle))
        self.remove(place)
        place.close()
        return True


# How many files this process may have open: every connection is one.


_log = logging.getLogger(__name__)

# What else is open: the model's files, pipes to the processes for texts, sockets to schedulers, probes.
_RESERVE: Final = 512
_DOORS: Final = 2


def allow_open_files(connections: int) -> None:
    """Asks for as many as so many connections of each door need, as far as the system allows: many let a process have
    1024 unless it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _RESERVE + _DOORS * connections
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_that_fit(wanted: int) -> int:
    """So many connections of each door, or fewer where there are not files enough: no door takes those of another, and
    some are left for probes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    fitting = max(16, (soft - _RESERVE) // _DOORS)
    if fitting < wanted:
        _log.warning("%d open files are too few for twice %d connections: each door takes %d", soft, wanted, fitting)
    return min(wanted, fitting)
