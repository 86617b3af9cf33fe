"""Shares the event loop between requests, and cuts off clients that do not read."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from typing import Final, TypeVar

from octavo.frontend.errors import Aborted, Reason

# What may go on in one turn, each some 50 to 500 us: where nobody comes, and while calls do.
_ALONE: Final = 64
_BESIDE: Final = 8
# The same of beginnings, which take longer than the next token of a stream.
_BEGINNINGS_ALONE: Final = 8
_BEGINNINGS_BESIDE: Final = 2
# For so long after a call another may be behind it.
_COMING_S: Final = 0.05


class Turns:
    """Belongs to one event loop. What waits goes on in the order in which it came."""

    def __init__(self, alone: int = _ALONE, beside: int = _BESIDE, clock: Callable[[], float] | None = None) -> None:
        self._alone = alone
        self._beside = beside
        self._clock = clock
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = 0
        self._is_counting = False
        self._came_at = float("-inf")

    def call_came(self) -> None:
        """A call was taken in."""
        self._came_at = self._now()

    async def take(self) -> None:
        """Returns when there is room for some work: at once, or in a later turn of the event loop."""
        if not self._waiting and self._taken < self._most():
            self._count(1)
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._count(0)
        await future

    @classmethod
    def of_beginnings(cls) -> "Turns":
        """For requests that are read, checked and prepared."""
        return cls(_BEGINNINGS_ALONE, _BEGINNINGS_BESIDE)

    def _most(self) -> int:
        return self._beside if self._now() - self._came_at < _COMING_S else self._alone

    def _now(self) -> float:
        return self._clock() if self._clock else asyncio.get_running_loop().time()

    def _count(self, taken: int) -> None:
        self._taken += taken
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._taken, self._is_counting = 0, False
        most = self._most()
        while self._waiting and self._taken < most:
            future = self._waiting.popleft()
            # Whoever waits may have gone.
            if not future.done():
                future.set_result(None)
                self._taken += 1
        if self._taken or self._waiting:
            self._count(0)


# Clients that do not read are cut off, so that nothing is computed and kept for them; and what takes too long is
# noticed without a timer for each time.


class Watch:
    """Calls `late` when a block `with watch` has taken `limit_s` seconds, and so many seconds later again.

    One timer for all its blocks, for setting one costs more than most of them take. Belongs to one event loop.
    """

    def __init__(self, limit_s: float, late: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._late = late
        self._loop = asyncio.get_running_loop()
        # When the block began, or was late last; None outside of one.
        self._since: float | None = None
        self._timer = self._loop.call_later(limit_s, self._check)

    def __enter__(self) -> None:
        self._since = self._loop.time()

    def __exit__(self, *error: object) -> None:
        self._since = None

    def close(self) -> None:
        """There will be no more blocks."""
        self._timer.cancel()

    def _check(self) -> None:
        now = self._loop.time()
        if self._since is not None and self._since + self._limit_s <= now:
            self._since = now
            self._late()
        self._timer = self._loop.call_at((self._since or now) + self._limit_s, self._check)


@asynccontextmanager
async def paced(stall_timeout_s: float) -> AsyncIterator[Watch]:
    """Goes around all that is written to one client; each write goes into a block `with pace`.

    Raises `Aborted` if a write takes more than so many seconds.
    """
    try:
        async with asyncio.timeout(None) as scope:
            with closing(Watch(stall_timeout_s, lambda: scope.reschedule(0.0))) as pace:
                yield pace
    except TimeoutError:
        if not scope.expired():
            raise
        raise slow_reader(stall_timeout_s) from None


def slow_reader(stall_timeout_s: float) -> Aborted:
    """The error of a request whose client has stopped to read."""
    return Aborted(
        Reason.SLOW_READER,
        f"the client has not read anything for {stall_timeout_s:g} s; read faster, or ask for incremental=false",
        stall_timeout_s=stall_timeout_s,
    )


# Long answers are written for their clients off the event loop, slice by slice, so that nobody else waits for them.


T = TypeVar("T")

# One for all: slices come in the order in which they are asked for, so answers have turns; and the event loop waits for
# one other at most to let go of Python's lock.
_WRITER: Final = ThreadPoolExecutor(1, thread_name_prefix="writer")


async def apart(write: Callable[[], T]) -> T:
    """What `write`, some milliseconds' work, gives."""
    return await asyncio.get_running_loop().run_in_executor(_WRITER, write)
