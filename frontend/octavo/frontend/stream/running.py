"""Holds the state of one request in a frontend, from its admission until it is forgotten."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from octavo.frontend.access.admission import Ticket
from octavo.frontend.errors import Aborted, Reason, ServiceError
from octavo.frontend.request.events import (
    Emitted,
    Event,
    OutputReady,
    RequestNotice,
    RequestStarted,
    SequenceFinished,
    TextDelta,
)
from octavo.frontend.request.pooling import PoolingRequest
from octavo.frontend.request.request import Caller, GenerationRequest
from octavo.frontend.scheduler.journal import Journal
from octavo.frontend.stream.answer import Answer
from octavo.frontend.stream.observer import Observer
from octavo.frontend.stream.pooling import OutputAnswer
from octavo.runtime.telemetry.tracing import Span
from octavo.wire.requests import NoticeKind


@dataclass(eq=False, slots=True)
class RunningRequest:
    """Holds one admitted request: who asked for what, who reads its events, what is reported of it, and how it ended.

    Readers are numbered as they come, and only the latest may read. The `answer` is there once the request is
    prepared. `failure` is the error that ended the request, if any. Once the request has `ended` its outcome is known;
    events that were sent can be read for as long as it is kept.
    """

    request: GenerationRequest | PoolingRequest
    request_id: str
    tenant: str
    caller: Caller
    arrived_at: float
    ticket: Ticket
    span: Span
    observer: Observer
    answer: Answer | OutputAnswer | None = None
    failure: ServiceError | None = None
    # Times of the event loop's clock, and what waits for them: see `Registry`.
    ended_at: float | None = None
    deadline: asyncio.TimerHandle | None = None
    expiry: asyncio.TimerHandle | None = None
    preparing: "asyncio.Task[None] | None" = None
    # When the latest of the tokens came that were reported.
    _last_token_at: float | None = None
    # The number of the latest reader, and the error that has ended its reading but not the request, if any.
    _reader: int = 0
    _reading_failure: ServiceError | None = None
    # Whether there was news since the latest reader waited last, and what it waits for now. `asyncio.Event` does the
    # same for many that wait, at three times the cost.
    _has_news: bool = True
    _waiting: "asyncio.Future[None] | None" = None
    _notices: dict[NoticeKind, RequestNotice] = field(default_factory=dict)

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

    def keep(self) -> None:
        """Notes that the request has a reader, and does not expire."""
        if self.expiry:
            self.expiry.cancel()
        self.expiry = None

    def end(self, error: ServiceError | None) -> None:
        """Notes and reports the outcome, and stops what prepares the request or waits for its deadline.

        The outcome is `error`, or else an answer that is complete, or a client that has left.
        """
        self.ended_at = asyncio.get_running_loop().time()
        for waiting in (self.deadline, self.preparing):
            if waiting:
                waiting.cancel()
        if error is not None:
            self.fail(error)
        self._report_end(error)

    # -- reading ----------------------------------------------------------------------------------------------------

    def take(self) -> int:
        """Returns the number of a new reader, whose first wait returns at once, and wakes the earlier one, whose
        reading ends."""
        self._reader += 1
        self._reading_failure = None
        self.notify()
        return self._reader

    def is_read_by(self, reader: int) -> bool:
        """Tells whether `reader` is still the latest reader."""
        return self._reader == reader

    def end_reading(self, reader: int, error: ServiceError) -> None:
        """Ends the reading of `reader`, but not the request, with `error`, unless another reads by now."""
        if self.is_read_by(reader):
            self._reading_failure = error
            self.notify()

    def check_reading(self, reader: int) -> None:
        """Raises the error that ended the reading of `reader`, if any."""
        if self._reader != reader:
            raise Aborted(Reason.SUPERSEDED, "another reader has taken over the events of this request")
        if self._reading_failure:
            raise self._reading_failure

    async def wait(self, reader: int) -> None:
        """Returns once there was news since the last call. Raises the error that ended the reading or the request."""
        self.check_reading(reader)
        if not self._has_news:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
            # Whoever took over meanwhile has yet to see the news.
            self.check_reading(reader)
        if self.failure:
            raise self.failure
        self._has_news = False

    def take_notices(self) -> list[RequestNotice]:
        """Returns the notices since the last call, in order."""
        if not self._notices:
            return []
        notices, self._notices = self._notices, {}
        return list(notices.values())

    # -- news -------------------------------------------------------------------------------------------------------

    def notify(self) -> None:
        """Wakes the reader, for there is news."""
        self._has_news = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def tell(self, notice: RequestNotice) -> None:
        """Keeps a notice for the reader, the latest of each kind, and wakes the reader."""
        self._notices.pop(notice.kind, None)
        self._notices[notice.kind] = notice
        self.notify()

    def fail(self, failure: ServiceError) -> None:
        """Ends the request for its reader; the first failure stays."""
        self.failure = self.failure or failure
        self.notify()

    # -- reporting --------------------------------------------------------------------------------------------------

    def report_prepared(self) -> None:
        """Corrects the request's work, once its prompt is tokenized and its limits are resolved."""
        prompt_tokens, sampling = len(self.journal.prompt_token_ids), self.journal.sampling
        if self.journal.pooling is not None:
            self.ticket.correct(prompt_tokens)
            self.span.set(prompt_tokens=prompt_tokens, task=self.journal.pooling.task.value)
            return
        self.ticket.correct(prompt_tokens + sampling.parallel * sampling.max_tokens)
        self.span.set(prompt_tokens=prompt_tokens, max_tokens=sampling.max_tokens, sequences=sampling.parallel)

    def report_events(self, events: Sequence[Emitted], num_tokens: int) -> None:
        """Reports the `events` that were made, and `num_tokens` generated tokens that were taken with them."""
        for emitted in events:
            # Nearly all bring tokens, which are reported together.
            if not isinstance(emitted.event, TextDelta):
                self._report(emitted.event)
        if num_tokens and self.answer is not None:
            now, before = self.answer.journal.last_token_at, self._last_token_at
            self.observer.tokens(num_tokens, None if now is None or before is None else now - before)
            self._last_token_at = now
            self.ticket.progress(num_tokens)

    def _report(self, event: Event) -> None:
        match event:
            case RequestStarted() | OutputReady():
                self._report_start()
            case SequenceFinished(reason):
                self.observer.sequence_finished(reason)
            case RequestNotice(kind):
                self.span.event(kind.value)

    def _report_end(self, error: ServiceError | None) -> None:
        answer, done = self.answer, 0
        if error is not None:
            (self.observer.failed if self.num_sent else self.observer.refused)(error)
        elif answer and answer.finished:
            usage = answer.usage()
            self.observer.finished(usage, usage.time_to_first_token_s + usage.decode_time_s)
        else:
            self.observer.left()
        if answer and answer.has_begun:
            done = len(answer.journal.prompt_token_ids) + answer.num_tokens
            drafts = answer.journal.draft_use
            self.span.set(drafted_tokens=drafts.drafted, accepted_tokens=drafts.accepted)
        # Work that is not done now will never be.
        self.ticket.correct(done)
        self.span.end("" if error is None else error.reason.value)

    def _report_start(self) -> None:
        journal = self.journal
        prompt_tokens = len(journal.prompt_token_ids)
        self.observer.prompt_tokens(prompt_tokens, journal.cached_prompt_tokens)
        if journal.first_token_at is not None:
            self.observer.first_token(journal.first_token_at - self.arrived_at)
        self.span.event("first_token", cached_prompt_tokens=journal.cached_prompt_tokens)
        self.ticket.progress(prompt_tokens)
