"""The newest records of the scheduler's doings, kept in memory for those who follow them."""

import asyncio
import sys
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """One record in msgpack, its number, and how many wanted ones before it are not kept any more."""

    number: int
    record: bytes
    missed: int


class StepFeed:
    """Records numbered from 1 on. As many of the newest are kept as `max_bytes` of memory hold, and always the last.

    A reader waits for records; nothing waits for a reader.
    """

    def __init__(self, max_bytes: int = 16 << 20) -> None:
        self._max_bytes = max_bytes
        self._records: deque[bytes] = deque()
        self._size = 0
        # The number of the newest record; 0 before the first.
        self.last = 0
        self._appended = asyncio.Event()

    @property
    def first(self) -> int:
        """The number of the oldest record that is kept, or of the first to come."""
        return self.last - len(self._records) + 1

    def append(self, record: bytes) -> None:
        """Adds a record, and lets old ones go."""
        self._records.append(record)
        self.last += 1
        self._size += sys.getsizeof(record)
        while self._size > self._max_bytes and len(self._records) > 1:
            self._size -= sys.getsizeof(self._records.popleft())
        self._appended.set()

    async def follow(self, start: int) -> AsyncGenerator[Entry, None]:
        """Records from number `start` on (0: from the oldest that is kept), those to come too, without end."""
        number = start or self.first
        while True:
            while number > self.last:
                self._appended.clear()
                await self._appended.wait()
            missed = max(0, self.first - number)
            number += missed
            yield Entry(number, self._records[number - self.first], missed)
            number += 1
