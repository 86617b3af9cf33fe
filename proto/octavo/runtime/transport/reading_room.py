"""Bounds how many gRPC calls have their messages read at once.

gRPC gives a Python server no bound on messages that clients have begun and do not finish: each takes up to 4 MiB, and
there may be thousands. But of a message that nobody has asked for, a client may send no more than a window. So only
some calls ask for theirs at a time; a message that is there already is read within a turn or two of the event loop.
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from typing import Final

# With messages of at most 4 MiB, 256 MiB.
_PLACES: Final = 64
# Seconds that an unfinished message may take while other calls wait for places.
_PATIENCE_S: Final = 1.0


class _Place:
    """Belongs to one call of `client`. `limit` ends its reading, which began at `since`, in the loop's seconds.

    `since` is infinite where no reading can be ended: before its begin, and once it has been told to end.
    """

    def __init__(self, client: str) -> None:
        self.client = client
        self.limit = asyncio.timeout(None)
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.since = math.inf


class ReadingRoom:
    """Shares `places` among clients, of which each has half at most; those that wait take turns. Belongs to one loop.

    While calls wait, the client with the most places loses those that it has had for long: for `patience_s` seconds,
    and the sooner the more calls wait.
    """

    def __init__(self, places: int = _PLACES, patience_s: float = _PATIENCE_S) -> None:
        self._places = places
        self._patience_s = patience_s
        # Longest first.
        self._taken: dict[_Place, None] = {}
        self._by_client: Counter[str] = Counter()
        # In the order in which they came, by client; the client whose turn it is comes first.
        self._waiting: dict[str, deque[_Place]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def place(self, client: str) -> AsyncIterator[None]:
        """Waits for a place and holds it for the block, out of which comes `TimeoutError` if the place is lost."""
        place = _Place(client)
        self._waiting.setdefault(client, deque()).append(place)
        self._grant()
        try:
            await place.granted
            async with place.limit:
                place.since = asyncio.get_running_loop().time()
                yield
        finally:
            self._leave(place)

    def _leave(self, place: _Place) -> None:
        if place in self._taken:
            del self._taken[place]
            self._by_client -= Counter([place.client])
        else:
            self._waiting[place.client].remove(place)
            self._forget(place.client)
        self._grant()

    def _grant(self) -> None:
        while len(self._taken) < self._places and (client := self._next()) is not None:
            queue = self._waiting.pop(client)
            place = queue.popleft()
            if queue:
                self._waiting[client] = queue
            self._taken[place] = None
            self._by_client[client] += 1
            # The call may have been cancelled, and leaves soon.
            if not place.granted.done():
                place.granted.set_result(None)
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._patience_s / 4, self._look)

    def _next(self) -> str | None:
        return next((client for client in self._waiting if self._by_client[client] < self._places // 2), None)

    def _forget(self, client: str) -> None:
        if not self._waiting[client]:
            del self._waiting[client]

    def _look(self) -> None:
        """Takes places back from the client with the most, one for each call that waits and is not yet to get one."""
        self._timer = None
        num_waiting = sum(map(len, self._waiting.values()))
        if not num_waiting:
            return
        num_ending = sum(place.limit.when() is not None for place in self._taken)
        now = asyncio.get_running_loop().time()
        latest = now - self._patience_s / (1 + num_waiting / self._places)
        [(most, _)] = self._by_client.most_common(1)
        old = (place for place in self._taken if place.client == most and place.since <= latest)
        for place in list(islice(old, max(0, num_waiting - num_ending))):
            place.since = math.inf
            place.limit.reschedule(now)
        self._grant()
