"""What a frontend holds of one request, from its admission until it is forgotten."""

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
    """`grace_s` is how long it is kept without a reader. `live` is what the scheduler was given, until it is done with.

    Once it has `ended` its outcome is known; what was told can be read for as long as it is kept.
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
        """Whether its last event was made."""
        return self.stream is not None and self.stream.finished

    @property
    def is_read(self) -> bool:
        """Whether somebody reads it."""
        return self._expiry is None

    @property
    def num_told(self) -> int:
        """How many events were made."""
        return len(self.stream) if self.stream else 0

    def told_after(self, offset: int) -> Iterator[list[Emitted]]:
        """The events after that offset which were made already, some at a time (maybe none)."""
        return self.stream.told_after(offset) if self.stream and offset < len(self.stream) else iter(())

    def fail_at(self, deadline: float, fail: Callable[[], None]) -> None:
        """Calls `fail` at a time of the event loop's clock, unless it has ended by then."""
        self._deadline = asyncio.get_running_loop().call_at(deadline, fail)

    def end(self, error: ServiceError | None) -> None:
        """Its outcome is known: see `Meter.ended`."""
        self._ended_at = asyncio.get_running_loop().time()
        if self._deadline:
            self._deadline.cancel()
        if self.preparing:
            self.preparing.cancel()
        if error is not None:
            self.reader.fail(error)
        self.meter.ended(error)

    def expire(self, forget: "Callable[[RunningRequest], None]") -> None:
        """Nobody reads it: calls `forget` once it was left, or has ended, so long ago as it is kept."""
        loop = asyncio.get_running_loop()
        self.keep()
        since = loop.time() if self._ended_at is None else self._ended_at
        self._expiry = loop.call_at(since + self.grace_s, forget, self)

    def keep(self) -> None:
        """Somebody reads it."""
        if self._expiry:
            self._expiry.cancel()
        self._expiry = None
