"""One stream of snapshots for all who watch: it is open while somebody does."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Final

from octavo.frontend.errors import Overloaded, Reason, Unavailable

MAX_VIEWERS: Final = 16
# How soon a viewer notices that the server is about to stop; connections then get a second to end.
_LOOK_S: Final = 0.2

_Box = asyncio.Queue[bytes | Exception]


class LiveView:
    """Gives every viewer the newest snapshot of `source`, which is opened for the first and closed after the last."""

    def __init__(self, source: Callable[[], AsyncGenerator[bytes]], is_stopping: Callable[[], bool]) -> None:
        self._source = source
        self._is_stopping = is_stopping
        self._boxes: set[_Box] = set()
        self._pump: asyncio.Task[None] | None = None
        # What a newcomer gets at once.
        self._newest: bytes | None = None

    async def watch(self) -> AsyncGenerator[bytes]:
        """Snapshots, until closed; a slow viewer misses some. Raises `Overloaded` where too many watch already,
        `Unavailable` when the server stops, and what the source raises."""
        if len(self._boxes) >= MAX_VIEWERS:
            raise Overloaded(
                Reason.TOO_MANY_REQUESTS, f"{MAX_VIEWERS} viewers watch already; close one of them", max=MAX_VIEWERS
            )
        box = self._enter()
        try:
            while True:
                yield await self._next(box)
        finally:
            self._leave(box)

    def _enter(self) -> _Box:
        box = _Box(maxsize=1)
        self._boxes.add(box)
        if self._pump is None or self._pump.done():
            self._pump, self._newest = asyncio.create_task(self._run()), None
        if self._newest is not None:
            box.put_nowait(self._newest)
        return box

    def _leave(self, box: _Box) -> None:
        self._boxes.discard(box)
        if not self._boxes and self._pump:
            self._pump.cancel()
            self._pump = None

    async def _next(self, box: _Box) -> bytes:
        while not self._is_stopping():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    found = await box.get()
                if isinstance(found, Exception):
                    raise found
                return found
        raise Unavailable(Reason.DRAINING, "this server is about to stop; watch another one")

    async def _run(self) -> None:
        try:
            async with contextlib.aclosing(self._source()) as snapshots:
                async for self._newest in snapshots:
                    self._put(self._newest)
        except Exception as error:
            self._put(error)

    def _put(self, found: bytes | Exception) -> None:
        for box in self._boxes:
            if box.full():
                box.get_nowait()
            box.put_nowait(found)
