"""Keeps the requests that run in a frontend, or are kept for a reader to come back, by their ids."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass

from octavo.frontend.errors import (
    DeadlineExceeded,
    NotFound,
    OutOfRange,
    Reason,
    ServiceError,
    Unavailable,
    internal_error,
    log_failure,
)
from octavo.frontend.request.events import Emitted
from octavo.frontend.request.request import Caller
from octavo.frontend.scheduler.pool import Listing, SchedulerPool
from octavo.frontend.stream.pacing import Turns, slow_reader
from octavo.frontend.stream.running import RunningRequest


class RequestBook:
    """Holds requests by id and tenant: a tenant neither sees the requests of others nor clashes with their ids."""

    def __init__(self) -> None:
        # By id, and then by tenant; the oldest comes first.
        self._namesakes: dict[str, dict[str, RunningRequest]] = {}

    def __iter__(self) -> Iterator[RunningRequest]:
        return (running for namesakes in self._namesakes.values() for running in namesakes.values())

    def get(self, request_id: str, caller: Caller) -> RunningRequest | None:
        """Returns the request that the id means to `caller`: its tenant's, or for a trusted one the oldest of all."""
        namesakes = self._namesakes.get(request_id, {})
        return next(iter(namesakes.values()), None) if caller.trusted else namesakes.get(caller.tenant)

    def add(self, running: RunningRequest) -> None:
        """Enters a request, whose tenant must have no other with that id."""
        namesakes = self._namesakes.setdefault(running.request_id, {})
        assert running.tenant not in namesakes
        namesakes[running.tenant] = running

    def remove(self, running: RunningRequest) -> None:
        """Takes out a request that was entered."""
        namesakes = self._namesakes[running.request_id]
        del namesakes[running.tenant]
        if not namesakes:
            del self._namesakes[running.request_id]


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Timeouts:
    """Bounds requests in seconds: the longest that a request may take, that it is kept without a reader, and that a
    reader may take for one event."""

    max_request_s: float
    max_detach_grace_s: float
    stall_timeout_s: float


class Registry:
    """Reads requests for their clients, ends them, and forgets them. Belongs to one event loop."""

    def __init__(self, scheduler: SchedulerPool, timeouts: Timeouts, turns: Turns) -> None:
        self.timeouts = timeouts
        self._scheduler = scheduler
        self._turns = turns
        self._requests = RequestBook()
        # Tasks that read requests without a reader.
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        """Returns how many requests have not ended, with a reader or without."""
        return sum(not running.ended for running in self._requests)

    def get(self, request_id: str, caller: Caller) -> RunningRequest | None:
        """Returns the caller's request with that id, or None: see `RequestBook.get`."""
        return self._requests.get(request_id, caller)

    def find(self, request_id: str, caller: Caller, after: int = 0) -> RunningRequest:
        """Returns the caller's request with that id.

        Raises `NotFound`, and `OutOfRange` if the request has sent fewer than `after` events.
        """
        running = self._requests.get(request_id, caller)
        if running is None:
            raise NotFound(
                Reason.REQUEST_NOT_FOUND,
                f"no request with id {request_id[:128]!r} runs here, or is kept; send it as a new one",
                request_id=request_id[:128],
            )
        if after > running.num_sent:
            raise OutOfRange(
                Reason.ATTACH_OFFSET_GONE,
                f"the request has told {running.num_sent} events and none with offset {after}; attach after one that"
                " was received",
                last_offset=running.num_sent,
            )
        return running

    def listed(self, listing: Listing) -> RunningRequest | None:
        """Returns the request that a scheduler lists under that name, or None."""
        return next((running for running in self._requests if self._scheduler.listing(running) == listing), None)

    def add(self, running: RunningRequest, deadline: float | None) -> None:
        """Enters a new request, to be ended at `deadline` (event loop's clock) or after `max_request_s` seconds."""
        self._requests.add(running)
        loop = asyncio.get_running_loop()
        latest = loop.time() + self.timeouts.max_request_s
        until = latest if deadline is None else min(deadline, latest)
        running.deadline = loop.call_at(until, self._end_late, running)

    async def read(
        self, begin: Callable[[], RunningRequest], after: int = 0, deadline: float | None = None
    ) -> AsyncGenerator[Emitted]:
        """Yields the events after the offset `after` of the request that `begin` returns, which is called with the
        first step of the iterator.

        `deadline` ends the reading. Closing the iterator leaves the request without a reader.
        """
        loop = asyncio.get_running_loop()
        running = begin()
        reader = running.take()
        running.keep()
        timer = None if deadline is None else loop.call_at(deadline, running.end_reading, reader, too_late())
        sent, handed_at = running.sent_after(after), loop.time()
        try:
            while (events := await self._next(running, reader, sent)) is not None:
                for emitted in events:
                    handed_at = loop.time()
                    yield emitted
                    running.check_reading(reader)
            self.end(running, None)
        except GeneratorExit:
            self._check_pace(running, reader, loop.time() - handed_at)
            raise
        except Exception as error:
            self._note(running, error)
            raise
        finally:
            if timer:
                timer.cancel()
            if running.is_read_by(reader):
                self._left(running)

    def end(self, running: RunningRequest, error: ServiceError | None) -> None:
        """Ends a request with `error`, or with None if it was answered or its client left. The first outcome counts."""
        if running.ended:
            return
        self._scheduler.release(running)
        running.end(error)
        if running.expiry:
            self._expire(running)

    def cut_off(self) -> None:
        """Ends all requests that still run, at the end of a drain."""
        message = "this frontend shut down before the answer was complete; send it to another"
        for running in self._requests:
            self.end(running, Unavailable(Reason.DRAINING, message))

    async def _next(self, running: RunningRequest, reader: int, sent: Iterator[list[Emitted]]) -> list[Emitted] | None:
        """Returns the next events, maybe none; None after the last. Events of `sent` come first."""
        for events in sent:
            await asyncio.sleep(0)
            running.check_reading(reader)
            return events
        if running.finished:
            return None
        await running.wait(reader)
        if not self._turns.take_now():
            await self._turns.take()
            running.check_reading(reader)
        return self._advance(running)

    def _advance(self, running: RunningRequest) -> list[Emitted]:
        """Makes and returns the events that are due, and tells the scheduler of sequences that have ended here."""
        if (answer := running.answer) is None:
            return []
        before = answer.num_tokens
        events = answer.advance(running.take_notices())
        running.report_events(events, answer.num_tokens - before)
        for index in answer.ended_here:
            self._scheduler.end_sequence(running, index)
        if answer.finished:
            self._scheduler.release(running)
        elif answer.fault:
            running.fail(answer.fault)
        elif answer.behind:
            running.notify()
        return events

    def _note(self, running: RunningRequest, error: Exception) -> None:
        """Ends the request with the error that ended its reading, unless that error is of the reading alone."""
        if not isinstance(error, ServiceError):
            self.end(running, internal_error())
        elif running.failure:
            self.end(running, running.failure)

    def _check_pace(self, running: RunningRequest, reader: int, taken_s: float) -> None:
        """Ends a request without grace if its client took too long for an event, with the error for slow readers."""
        limit_s = self.timeouts.stall_timeout_s
        if taken_s >= limit_s and not self._grace_s(running) and running.is_read_by(reader):
            self.end(running, slow_reader(limit_s))

    def _left(self, running: RunningRequest) -> None:
        """Handles a request that has lost its reader: it is forgotten now, or after its grace."""
        if not self._grace_s(running):
            self._forget(running)
            return
        self._expire(running)
        if not running.ended:
            # The right to read is taken here, for a reader may take over before the task has begun.
            task = asyncio.create_task(self._run_on(running, running.take()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run_on(self, running: RunningRequest, reader: int) -> None:
        """Reads a request without a reader, so that its end is noticed, until a reader takes over."""
        try:
            while await self._next(running, reader, iter(())) is not None:
                pass
            self.end(running, None)
        except Exception as error:
            if not isinstance(error, ServiceError):
                log_failure(_log, "a request failed that nobody reads")
            self._note(running, error)

    def _end_late(self, running: RunningRequest) -> None:
        self.end(running, too_late())

    def _grace_s(self, running: RunningRequest) -> float:
        """Returns how many seconds the request is kept without a reader."""
        return min(running.request.detach_grace_s, self.timeouts.max_detach_grace_s)

    def _expire(self, running: RunningRequest) -> None:
        """Notes that nobody reads the request, which is forgotten its grace after now, or after an earlier end."""
        loop = asyncio.get_running_loop()
        running.keep()
        since = loop.time() if running.ended_at is None else running.ended_at
        running.expiry = loop.call_at(since + self._grace_s(running), self._forget, running)

    def _forget(self, running: RunningRequest) -> None:
        running.keep()
        self.end(running, None)
        self._requests.remove(running)
        # Ends `_run_on`, if that reads the request.
        running.take()
        running.ticket.release()


def too_late() -> DeadlineExceeded:
    """Returns the error for a request that takes too long."""
    return DeadlineExceeded(
        Reason.DEADLINE, "the deadline passed before the answer was complete; allow more time or ask for less"
    )
