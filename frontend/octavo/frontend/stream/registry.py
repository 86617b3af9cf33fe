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
from octavo.frontend.scheduler.reader import ReadLease
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

    def __init__(self, scheduler: SchedulerPool, patience: Timeouts, turns: Turns | None = None) -> None:
        self.patience = patience
        self._turns = turns or Turns()
        self._scheduler = scheduler
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

    def find(self, request_id: str, caller: Caller) -> RunningRequest:
        """Returns the caller's request with that id. Raises `NotFound`."""
        running = self._requests.get(request_id, caller)
        if running is None:
            raise NotFound(
                Reason.REQUEST_NOT_FOUND,
                f"no request with id {request_id[:128]!r} runs here, or is kept; send it as a new one",
                request_id=request_id[:128],
            )
        return running

    def listing(self, running: RunningRequest) -> Listing | None:
        """Returns the name under which a scheduler lists the request; None while no scheduler holds it."""
        return None if running.live is None else self._scheduler.listing(running.live)

    def listed(self, listing: Listing) -> RunningRequest | None:
        """Returns the request that a scheduler lists under that name, or None."""
        return next((running for running in self._requests if self.listing(running) == listing), None)

    def add(self, running: RunningRequest, deadline: float | None) -> None:
        """Enters a new request, to be ended at `deadline` (event loop's clock) or after `max_request_s` seconds."""
        self._requests.add(running)
        latest = asyncio.get_running_loop().time() + self.patience.max_request_s
        running.fail_at(latest if deadline is None else min(deadline, latest), lambda: self.end(running, too_late()))

    def attachable(self, request_id: str, after: int, caller: Caller) -> RunningRequest:
        """Returns the caller's request with that id.

        Raises `NotFound`, and `OutOfRange` if the request has sent fewer than `after` events.
        """
        running = self.find(request_id, caller)
        if after > running.num_sent:
            raise OutOfRange(
                Reason.ATTACH_OFFSET_GONE,
                f"the request has told {running.num_sent} events and none with offset {after}; attach after one that"
                " was received",
                last_offset=running.num_sent,
            )
        return running

    def end(self, running: RunningRequest, error: ServiceError | None) -> None:
        """Ends a request with `error`, or with None if it was answered or its client left. The first outcome counts."""
        if running.ended:
            return
        self._release(running)
        running.end(error)
        if not running.is_read:
            running.expire(self._forget)

    def cut_off(self) -> None:
        """Ends all requests that still run, at the end of a drain."""
        message = "this frontend shut down before the answer was complete; send it to another"
        for running in self._requests:
            self.end(running, Unavailable(Reason.DRAINING, message))

    async def read(
        self, find: Callable[[], RunningRequest], after: int, deadline: float | None = None
    ) -> AsyncGenerator[Emitted]:
        """Yields the events after the offset `after` of the request that `find` returns.

        `deadline` ends the reading. Closing the iterator leaves the request without a reader.
        """
        running, loop = find(), asyncio.get_running_loop()
        turn = running.reader.take()
        running.keep()
        timer = None if deadline is None else loop.call_at(deadline, turn.end, too_late())
        sent, handed_at = running.sent_after(after), loop.time()
        try:
            while (events := await self._next(running, turn, sent)) is not None:
                for emitted in events:
                    handed_at = loop.time()
                    yield emitted
                    turn.check()
            self.end(running, None)
        except GeneratorExit:
            self._check_pace(running, turn, loop.time() - handed_at)
            raise
        except Exception as error:
            self._note(running, turn, error)
            raise
        finally:
            if timer:
                timer.cancel()
            if running.reader.is_held_by(turn):
                self._left(running)

    async def _next(
        self, running: RunningRequest, turn: ReadLease, sent: Iterator[list[Emitted]]
    ) -> list[Emitted] | None:
        """Returns the next events, maybe none; None after the last. Events of `sent` come first."""
        for events in sent:
            await asyncio.sleep(0)
            turn.check()
            return events
        if running.finished:
            return None
        await turn.wait()
        await self._turns.take()
        turn.check()
        return self._advance(running)

    def _advance(self, running: RunningRequest) -> list[Emitted]:
        """Makes and returns the events that are due, and tells the scheduler of sequences that have ended here."""
        if (stream := running.stream) is None:
            return []
        events = stream.advance()
        running.meter.advanced(stream.journal, stream.num_tokens, events)
        if running.live:
            for index in stream.ended_here():
                self._scheduler.end_sequence(running.live, index)
        if stream.finished:
            self._release(running)
        return events

    def _note(self, running: RunningRequest, turn: ReadLease, error: Exception) -> None:
        """Ends the request with the error that ended its reading, unless that error is of the reading alone."""
        if error is not turn.failure:
            self.end(running, error if isinstance(error, ServiceError) else internal_error())

    def _check_pace(self, running: RunningRequest, turn: ReadLease, taken_s: float) -> None:
        """Ends a request without grace if its client took too long for an event, with the error for slow readers."""
        if taken_s >= self.patience.stall_timeout_s and not running.grace_s and running.reader.is_held_by(turn):
            self.end(running, slow_reader(self.patience.stall_timeout_s))

    def _left(self, running: RunningRequest) -> None:
        """Handles a request that has lost its reader: it is forgotten now, or after its grace."""
        if not running.grace_s:
            self._forget(running)
            return
        running.expire(self._forget)
        if not running.ended:
            # The lease is taken here, for a reader may take over before the task has begun.
            task = asyncio.create_task(self._run_on(running, running.reader.take()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run_on(self, running: RunningRequest, turn: ReadLease) -> None:
        """Reads a request without a reader, so that its end is noticed, until a reader takes over."""
        try:
            while await self._next(running, turn, iter(())) is not None:
                pass
            self.end(running, None)
        except Exception as error:
            if not isinstance(error, ServiceError):
                log_failure(_log, "a request failed that nobody reads")
            self._note(running, turn, error)

    def _release(self, running: RunningRequest) -> None:
        """Gives the request up at the scheduler, if the scheduler still holds it."""
        live, running.live = running.live, None
        if live is not None:
            self._scheduler.release(live)

    def _forget(self, running: RunningRequest) -> None:
        running.keep()
        self.end(running, None)
        self._requests.remove(running)
        # Ends `_run_on`, if that reads the request.
        running.reader.take()
        running.meter.forgotten()


def too_late() -> DeadlineExceeded:
    """Returns the error for a request that takes too long."""
    return DeadlineExceeded(
        Reason.DEADLINE, "the deadline passed before the answer was complete; allow more time or ask for less"
    )
