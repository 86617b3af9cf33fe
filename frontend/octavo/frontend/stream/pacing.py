"""Shares the event loop between requests, and cuts off clients that do not read.

gRPC takes in one call in a turn or two of the event loop. If one turn held the work of thousands of streams, calls
behind a burst would wait for seconds to hear that there is no room. So a turn holds only so much work, and little while
calls come. The beginnings of requests are counted apart from running streams: else the next token of a stream would
wait behind all the beginnings of a burst.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from typing import Final, TypeVar

from octavo.frontend.errors import Aborted, Reason

# Pieces of work in one turn, of some 50 to 500 us each: while no call comes, and while calls do.
_ALONE: Final = 64
_BESIDE: Final = 8
# The same for beginnings of requests, which take longer than the next token of a stream.
_BEGINNINGS_ALONE: Final = 8
_BEGINNINGS_BESIDE: Final = 2
# Seconds after a call for which another is expected behind it.
_COMING_S: Final = 0.05


class Turns:
    """Grants turns to work in the order in which it came. Belongs to one event loop.

    `alone` and `beside` are how many pieces of work go on in one turn of the event loop while no call comes, and
    while calls do. `clock` gives seconds; None is the event loop's.
    """

    def __init__(self, alone: int = _ALONE, beside: int = _BESIDE, clock: Callable[[], float] | None = None) -> None:
        self._alone = alone
        self._beside = beside
        self._clock = clock
        self._waiting: deque[asyncio.Future[None]] = deque()
        # How much goes on in this turn, and how much may; counted from the first piece of work on.
        self._is_counting = False
        self._taken, self._most = 0, alone
        self._came_at = float("-inf")

    def call_came(self) -> None:
        """Notes that a call was taken in."""
        self._came_at = self._now()
        self._most = self._beside

    def take_now(self) -> bool:
        """Takes room for one piece of work if there is any in this turn of the event loop; returns whether there
        was."""
        if not self._is_counting:
            self._begin_turn()
        if self._taken >= self._most or self._waiting:
            return False
        self._taken += 1
        return True

    async def take(self) -> None:
        """Returns when there is room for one piece of work: at once, or in a later turn of the event loop."""
        if self.take_now():
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    async def others_first(self) -> None:
        """Lets the other work of this turn of the event loop go on first, if there is any.

        What all of it writes leaves together then: where work and writes alternate, the thread that hears of each write
        falls asleep and is woken in between, which costs as much as the work.
        """
        if self._is_counting and self._taken > 1:
            await asyncio.sleep(0)

    @classmethod
    def of_beginnings(cls) -> "Turns":
        """Makes the turns for requests that are read, checked and prepared."""
        return cls(_BEGINNINGS_ALONE, _BEGINNINGS_BESIDE)

    def _now(self) -> float:
        return self._clock() if self._clock else asyncio.get_running_loop().time()

    def _begin_turn(self) -> None:
        self._is_counting = True
        self._taken, self._most = 0, self._beside if self._now() - self._came_at < _COMING_S else self._alone
        asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_counting = False
        if not self._waiting:
            return
        self._begin_turn()
        while self._waiting and self._taken < self._most:
            future = self._waiting.popleft()
            # The request that waits may have been cancelled.
            if not future.done():
                future.set_result(None)
                self._taken += 1


class Watch:
    """Calls `late` when a block `with watch` has taken `limit_s` seconds, and again after as many seconds more.

    All blocks share one timer, for setting a timer costs more time than most blocks take. Belongs to one event loop.
    """

    def __init__(self, limit_s: float, late: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._late = late
        self._loop = asyncio.get_running_loop()
        # The time at which the block began, or was late last; None outside of a block.
        self._since: float | None = None
        self._timer = self._loop.call_later(limit_s, self._check)

    def __enter__(self) -> None:
        self._since = self._loop.time()

    def __exit__(self, *error: object) -> None:
        self._since = None

    def close(self) -> None:
        """Ends the timer. No further block may be entered."""
        self._timer.cancel()

    def _check(self) -> None:
        now = self._loop.time()
        if self._since is not None and self._since + self._limit_s <= now:
            self._since = now
            self._late()
        self._timer = self._loop.call_at((self._since or now) + self._limit_s, self._check)


@asynccontextmanager
async def paced(stall_timeout_s: float) -> AsyncIterator[Watch]:
    """Surrounds all writes to one client; each write goes into a block `with` the yielded watch.

    Raises `Aborted` if a write takes more than `stall_timeout_s` seconds.
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
    """Returns the error for a request whose client has stopped reading."""
    return Aborted(
        Reason.SLOW_READER,
        f"the client has not read anything for {stall_timeout_s:g} s; read faster, or ask for incremental=false",
        stall_timeout_s=stall_timeout_s,
    )


T = TypeVar("T")

# One thread writes long answers slice by slice, so that nobody else waits for them. Slices come in the order in which
# they are asked for, so answers have turns; and the event loop waits for one other thread at most to release Python's
# lock.
_WRITER: Final = ThreadPoolExecutor(1, thread_name_prefix="writer")


async def apart(write: Callable[[], T]) -> T:
    """Runs `write`, some milliseconds' work, in the writing thread, and returns its result."""
    return await asyncio.get_running_loop().run_in_executor(_WRITER, write)
