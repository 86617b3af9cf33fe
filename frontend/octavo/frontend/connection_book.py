"""Who has how many connections: where there are too many, those that nobody needs are closed, the longest idle first,
of the client that has most. So no client, however many it opens, keeps another out."""

from collections.abc import Callable, Iterable


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
