"""Who waits for a request's tokens: woken when there is something to see, told once why there will be no more."""

import asyncio

from octavo.frontend.errors import ServiceError


class Reader:
    """One request's, from its check to the end of its stream. Belongs to one event loop."""

    def __init__(self) -> None:
        self.failure: ServiceError | None = None
        self._event = asyncio.Event()

    def notify(self) -> None:
        """There is something to see."""
        self._event.set()

    def fail(self, failure: ServiceError) -> None:
        """Ends the request for its reader; the first failure stays."""
        self.failure = self.failure or failure
        self._event.set()

    def check(self) -> None:
        """Raises the failure, if there is one."""
        if self.failure:
            raise self.failure

    async def wait(self) -> None:
        """Returns when there was something to see since the last call. Raises the failure."""
        await self._event.wait()
        self.check()
        self._event.clear()
