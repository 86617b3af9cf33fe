"""Holds the state of one request in a frontend, from its admission until it is forgotten."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from octavo.frontend.access.admission import Ticket
from octavo.frontend.errors import Aborted, Reason, ServiceError
from octavo.frontend.request.events import Emitted, Notice
from octavo.frontend.request.request import Caller, GenerationRequest
from octavo.frontend.scheduler.journal import Journal
from octavo.frontend.stream.answer import Answer
from octavo.runtime.telemetry.tracing import Span
from octavo.wire.requests import NoticeKind


def _fresh_news() -> asyncio.Event:
    news = asyncio.Event()
    news.set()
    return news


@dataclass(eq=False, slots=True)
class RunningRequest:
    """Holds one admitted request: who asked for what, who reads its events, and how it ended.

    One reads at a time. The right to read is the latest event that `take` has returned: it is set whenever there is
    news. The `answer` is there once the request is prepared. `failure` is the error that ended the request, if any.
    Once the request has `ended` its outcome is known; events that were sent can be read for as long as it is kept.
    """

    request: GenerationRequest
    request_id: str
    tenant: str
    caller: Caller
    arrived_at: float
    ticket: Ticket
    span: Span
    answer: Answer | None = None
    failure: ServiceError | None = None
    # When the latest of the tokens came that were read.
    last_token_at: float | None = None
    # Times of the event loop's clock, and what waits for them: see `Registry`.
    ended_at: float | None = None
    deadline: asyncio.TimerHandle | None = None
    expiry: asyncio.TimerHandle | None = None
    preparing: "asyncio.Task[None] | None" = None
    _news: asyncio.Event = field(default_factory=_fresh_news)
    _notices: dict[NoticeKind, Notice] = field(default_factory=dict)

    @property
    def journal(self) -> Journal:
        """Returns the journal of a request that is prepared."""
        assert self.answer is not None, "the request is not prepared"
        return self.answer.journal

    @property
    def ended(self) -> bool:
        """Tells whether the outcome is known."""
        return self.ended_at is not None

    @property
    def finished(self) -> bool:
        """Tells whether the last event was made."""
        return self.answer is not None and self.answer.finished

    @property
    def num_sent(self) -> int:
        """Returns how many events were made."""
        return self.answer.num_events if self.answer else 0

    def sent_after(self, offset: int) -> Iterator[list[Emitted]]:
        """Yields the events after `offset` that were made already, some at a time (maybe none)."""
        return self.answer.sent_after(offset) if self.answer and offset < self.num_sent else iter(())

    # -- reading ----------------------------------------------------------------------------------------------------

    def take(self) -> asyncio.Event:
        """Returns the right to read, for a new reader, and ends that of the earlier one. The first wait returns at
        once."""
        earlier, self._news = self._news, _fresh_news()
        earlier.set()
        return self._news

    def is_read_by(self, news: asyncio.Event) -> bool:
        """Tells whether `news` is still the latest right to read."""
        return self._news is news

    def check(self, news: asyncio.Event) -> None:
        """Raises `Aborted` if another reader has taken over."""
        if self._news is not news:
            raise Aborted(Reason.SUPERSEDED, "another reader has taken over the events of this request")

    async def wait(self, news: asyncio.Event) -> None:
        """Returns once there was news since the last call. Raises the error that ended the reading or the request."""
        await news.wait()
        self.check(news)
        if self.failure:
            raise self.failure
        news.clear()

    def take_notices(self) -> list[Notice]:
        """Returns the notices since the last call, in order."""
        if not self._notices:
            return []
        notices, self._notices = self._notices, {}
        return list(notices.values())

    # -- news -------------------------------------------------------------------------------------------------------

    def notify(self) -> None:
        """Wakes the reader, for there is news."""
        self._news.set()

    def tell(self, notice: Notice) -> None:
        """Keeps a notice for the reader, the latest of each kind, and wakes the reader."""
        self._notices.pop(notice.kind, None)
        self._notices[notice.kind] = notice
        self.notify()

    def fail(self, failure: ServiceError) -> None:
        """Ends the request for its reader; the first failure stays."""
        self.failure = self.failure or failure
        self.notify()
