"""Who waits for a request's events: woken when there is something to see, told once why there will be no more."""

import asyncio

from octavo.frontend.errors import Aborted, Reason, ServiceError
from octavo.frontend.request.events import Notice
from octavo.wire.requests import NoticeKind


class ReadLease:
    """One reader's right to read, until another takes it. Waits for nothing at first."""

    def __init__(self, reader: "Reader") -> None:
        self.failure: ServiceError | None = None
        self._reader = reader
        self._news = asyncio.Event()
        self._news.set()

    def wake(self) -> None:
        """There is something to see."""
        self._news.set()

    def end(self, failure: ServiceError) -> None:
        """Ends the reading, not what is read."""
        self.failure = self.failure or failure
        self._news.set()

    def check(self) -> None:
        """Raises why the reading has ended."""
        if self.failure:
            raise self.failure

    async def wait(self) -> None:
        """Returns when there was something to see since the last call. Raises why the reading has ended, or the
        request."""
        await self._news.wait()
        self.check()
        if self._reader.failure:
            raise self._reader.failure
        self._news.clear()


class Reader:
    """One request's, from its check until it is forgotten; one reads at a time. Belongs to one event loop."""

    def __init__(self) -> None:
        self.failure: ServiceError | None = None
        self._turn = ReadLease(self)
        self._notices: dict[NoticeKind, Notice] = {}

    def take(self) -> ReadLease:
        """The right to read, taken from whoever had it."""
        earlier, self._turn = self._turn, ReadLease(self)
        earlier.end(Aborted(Reason.SUPERSEDED, "another reader has taken over the events of this request"))
        return self._turn

    def is_held_by(self, turn: ReadLease) -> bool:
        """Whether nobody has taken it since."""
        return self._turn is turn

    def notify(self) -> None:
        """There is something to see."""
        self._turn.wake()

    def tell(self, notice: Notice) -> None:
        """Something has happened that is no output. Of a kind only the latest is kept."""
        self._notices.pop(notice.kind, None)
        self._notices[notice.kind] = notice
        self.notify()

    def take_notices(self) -> list[Notice]:
        """What was told since the last call, in order."""
        if not self._notices:
            return []
        notices, self._notices = self._notices, {}
        return list(notices.values())

    def fail(self, failure: ServiceError) -> None:
        """Ends the request for whoever reads it; the first failure stays."""
        self.failure = self.failure or failure
        self._turn.wake()
