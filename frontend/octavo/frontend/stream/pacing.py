"""Clients that do not read are cut off, so that nothing is computed and kept for them; and what takes too long is
noticed without a timer for each time.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from typing import Final, TypeVar

from octavo.frontend.errors import Aborted, Reason


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
