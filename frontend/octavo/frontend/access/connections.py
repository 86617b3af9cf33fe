"""Counts the connections of each client, and bounds them by what this process may have open.

Where there are too many, the idle connections of the client with most are closed, the longest idle first. So no
client, however many connections it opens, keeps another out.
"""

import logging
import resource
from collections.abc import Callable, Iterable
from typing import Final


class Place:
    """Stands for one connection of `client`. The connection is idle, from the start, while no answer is due over it.

    `close` ends the connection. It may be replaced once a gentler way to end the connection is known.
    """

    def __init__(self, book: "ConnectionBook", client: str, close: Callable[[], None]) -> None:
        self.client = client
        self.close = close
        self._book = book

    def set_busy(self) -> None:
        """Notes that an answer is due over the connection."""
        self._book.set_busy(self)

    def set_idle(self) -> None:
        """Notes that no answer is due over the connection any more."""
        self._book.set_idle(self)

    def leave(self) -> None:
        """Notes that the connection has ended. Idempotent."""
        self._book.remove(self)


class _Client:
    """Holds the connections of one client. `idle` is in order, the longest idle first."""

    def __init__(self) -> None:
        self.idle: dict[Place, None] = {}
        self.busy: set[Place] = set()

    def __len__(self) -> int:
        return len(self.idle) + len(self.busy)


class ConnectionBook:
    """Holds the connections of one interface, gRPC or HTTP. Belongs to one event loop.

    One client has half of `max_connections` at most. A connection over a unix socket belongs to no client. `on_empty`
    is called when the last connection has ended.
    """

    def __init__(self, max_connections: int, on_empty: Callable[[], None] = lambda: None) -> None:
        self.max_connections = max_connections
        self._on_empty = on_empty
        self._max_of_one = max(1, max_connections // 2)
        self._clients: dict[str, _Client] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def enter(self, client: str, close: Callable[[], None]) -> Place | None:
        """Enters a new connection; returns None if there is no room, since all others are busy."""
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
        """Carries out `Place.set_busy`; `set_idle` and `remove` carry out `Place.set_idle` and `Place.leave`."""
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
        if not self._count:
            self._on_empty()

    def _close_one(self, clients: Iterable[_Client]) -> bool:
        """Closes the longest idle connection of the client with most; returns whether there was one."""
        most = max((client for client in clients if client.idle), key=len, default=None)
        if most is None:
            return False
        place = next(iter(most.idle))
        self.remove(place)
        place.close()
        return True


_log = logging.getLogger(__name__)

# Files that are open besides connections: the model's files, sockets to text processes and schedulers, probes.
_RESERVE: Final = 512
# gRPC and HTTP.
_INTERFACES: Final = 2


def allow_open_files(connections: int) -> None:
    """Raises the limit of open files for so many `connections` over each interface, as far as the system allows.

    Many systems let a process have 1024 files unless it asks for more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _RESERVE + _INTERFACES * connections
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_that_fit(wanted: int) -> int:
    """Returns `wanted` connections per interface, or fewer if this process may not open enough files.

    So neither interface takes the files of the other, and some are left for probes.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    fitting = max(16, (soft - _RESERVE) // _INTERFACES)
    if fitting < wanted:
        _log.warning("%d open files are too few for twice %d connections: each door takes %d", soft, wanted, fitting)
    return min(wanted, fitting)
