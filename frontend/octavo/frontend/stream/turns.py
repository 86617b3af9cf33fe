"""Shares the turns of the event loop between what was taken in and what comes.

gRPC takes in one call in a turn or two. Where a turn holds the work of thousands of streams, calls behind a burst would
wait for seconds to be told that there is no room. So a turn holds only so much work, and little while calls come.

What begins is counted apart: else the next token of a stream that runs would wait behind all the beginnings of a burst.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

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
