"""Wakes whoever reads a request's events when there is news, and ends the reading with an error when it must end."""

import asyncio

from octavo.frontend.errors import Aborted, Reason, ServiceError
from octavo.frontend.request.events import Notice
from octavo.wire.requests import NoticeKind


class ReadLease:
    """Holds one reader's right to read, until another reader takes over. The first wait returns at once."""

    def __init__(self, reader: "Reader") -> None:
        self.failure: ServiceError | None = None
        self._reader = reader
        self._news = asyncio.Event()
        self._news.set()

    def wake(self) -> None:
        """Wakes the reader, for there is news."""
        self._news.set()

    def end(self, failure: ServiceError) -> None:
        """Ends the reading with `failure`; the request goes on."""
        self.failure = self.failure or failure
        self._news.set()

    def check(self) -> None:
        """Raises the error with which the reading has ended, if it has."""
        if self.failure:
            raise self.failure

    async def wait(self) -> None:
        """Returns once there was news since the last call. Raises the error that ended the reading or the request."""
        await self._news.wait()
        self.check()
        if self._reader.failure:
            raise self._reader.failure
        self._news.clear()


class Reader:
    """Passes a request's news to whoever holds its lease; one reads at a time. Belongs to one event loop.

    `failure` is the error that ended the request, if any.
    """

    def __init__(self) -> None:
        self.failure: ServiceError | None = None
        self._turn = ReadLease(self)
        self._notices: dict[NoticeKind, Notice] = {}

    def take(self) -> ReadLease:
        """Returns a new lease, and ends the lease of the earlier reader."""
        earlier, self._turn = self._turn, ReadLease(self)
        earlier.end(Aborted(Reason.SUPERSEDED, "another reader has taken over the events of this request"))
        return self._turn

    def is_held_by(self, turn: ReadLease) -> bool:
        """Tells whether `turn` is still the latest lease."""
        return self._turn is turn

    def notify(self) -> None:
        """Wakes the reader, for there is news."""
        self._turn.wake()

    def tell(self, notice: Notice) -> None:
        """Keeps a notice for the reader, the latest of each kind, and wakes the reader."""
        self._notices.pop(notice.kind, None)
        self._notices[notice.kind] = notice
        self.notify()

    def take_notices(self) -> list[Notice]:
        """Returns the notices since the last call, in order."""
        if not self._notices:
            return []
        notices, self._notices = self._notices, {}
        return list(notices.values())

    def fail(self, failure: ServiceError) -> None:
        """Ends the request for its reader; the first failure stays."""
        self.failure = self.failure or failure
        self._turn.wake()
