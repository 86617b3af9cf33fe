"""Holds the state of one request in a frontend, from its admission until it is forgotten."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from octavo.frontend.errors import ServiceError
from octavo.frontend.request.events import Emitted
from octavo.frontend.request.request import ANYBODY, Caller, GenerationRequest
from octavo.frontend.scheduler.reader import Reader
from octavo.frontend.scheduler.session import LiveRequest
from octavo.frontend.stream.meter import Meter
from octavo.frontend.stream.stream import Stream


@dataclass(eq=False)
class RunningRequest:
    """Holds one admitted request. `grace_s` is how many seconds it is kept without a reader.

    `live` is the request as it was submitted, until the scheduler is done with it. Once the request has `ended` its
    outcome is known; events that were sent can be read for as long as the request is kept.
    """

    request: GenerationRequest
    request_id: str
    tenant: str
    salt: str
    arrived_at: float
    grace_s: float
    meter: Meter
    caller: Caller = ANYBODY
    reader: Reader = field(default_factory=Reader)
    live: LiveRequest | None = None
    stream: Stream | None = None
    preparing: "asyncio.Task[None] | None" = None
    _deadline: asyncio.TimerHandle | None = None
    _expiry: asyncio.TimerHandle | None = None
    _ended_at: float | None = None

    @property
    def ended(self) -> bool:
        return self._ended_at is not None

    @property
    def finished(self) -> bool:
        """Tells whether the last event was made."""
        return self.stream is not None and self.stream.finished

    @property
    def is_read(self) -> bool:
        """Tells whether the request has a reader."""
        return self._expiry is None

    @property
    def num_sent(self) -> int:
        """Returns how many events were made."""
        return len(self.stream) if self.stream else 0

    def sent_after(self, offset: int) -> Iterator[list[Emitted]]:
        """Yields the events after `offset` that were made already, some at a time (maybe none)."""
        return self.stream.sent_after(offset) if self.stream and offset < len(self.stream) else iter(())

    def fail_at(self, deadline: float, fail: Callable[[], None]) -> None:
        """Calls `fail` at `deadline`, a time of the event loop's clock, unless the request has ended by then."""
        self._deadline = asyncio.get_running_loop().call_at(deadline, fail)

    def end(self, error: ServiceError | None) -> None:
        """Notes the outcome, and stops what still prepares the request: see `Meter.ended`."""
        self._ended_at = asyncio.get_running_loop().time()
        if self._deadline:
            self._deadline.cancel()
        if self.preparing:
            self.preparing.cancel()
        if error is not None:
            self.reader.fail(error)
        self.meter.ended(error)

    def expire(self, forget: "Callable[[RunningRequest], None]") -> None:
        """Notes that the reader left. Calls `forget` `grace_s` seconds from now, or from an earlier end."""
        loop = asyncio.get_running_loop()
        self.keep()
        since = loop.time() if self._ended_at is None else self._ended_at
        self._expiry = loop.call_at(since + self.grace_s, forget, self)

    def keep(self) -> None:
        """Notes that the request has a reader, and is kept."""
        if self._expiry:
            self._expiry.cancel()
        self._expiry = None
