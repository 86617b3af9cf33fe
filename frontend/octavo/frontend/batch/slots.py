"""Bounds how many calls of batches are under way, and shares this number between tenants."""

import asyncio
from collections import Counter, deque


class Slots:
    """Holds `size` slots. One that becomes free goes to the tenant with fewest, of those that wait.

    Belongs to one event loop.
    """

    def __init__(self, size: int) -> None:
        self._free = size
        self._used: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def take(self, tenant: str) -> None:
        """Waits for a slot."""
        if self._free:
            self._give(tenant)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(tenant)
            raise

    def release(self, tenant: str) -> None:
        """Gives a slot back."""
        self._free += 1
        # Subtraction drops tenants that have none.
        self._used -= Counter([tenant])
        while self._free and self._waiting:
            self._wake(min(self._waiting, key=lambda each: self._used[each]))

    def _wake(self, tenant: str) -> None:
        waiting = self._waiting[tenant]
        turn = waiting.popleft()
        if not waiting:
            del self._waiting[tenant]
        if not turn.done():
            self._give(tenant)
            turn.set_result(None)

    def _give(self, tenant: str) -> None:
        self._free -= 1
        self._used[tenant] += 1
