"""Responses that are written while they are made: server-sent events, and one long body in slices."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.frontend.errors import ServiceError, internal_error, log_failure
from octavo.frontend.http.connection import until_gone
from octavo.frontend.http.errors import error_body, error_response
from octavo.frontend.stream.pacing import Watch

_log = logging.getLogger(__name__)


class Sliced(Response):
    """Sends what `source` yields, which is closed when the client goes away. Nobody knows how long it will be."""

    def __init__(self, source: AsyncGenerator[bytes], *, headers: Mapping[str, str], media_type: str) -> None:
        self._source = source
        self._head = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        self._head.append((b"content-type", media_type.encode("latin-1")))
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(until_gone(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self._head})
            async with contextlib.aclosing(self._source) as source:
                async for body in source:
                    if gone.done():
                        return
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Exception:
            # The answer breaks off, and the client sees that it does.
            log_failure(_log, "an answer could not be written")
            raise
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)


# What is sent in one piece, but for the event that makes it more.
_MOST_BYTES: Final = 64 << 10
DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": ping\n\n"
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies that gather an answer first would undo the streaming.
    (b"x-accel-buffering", b"no"),
]


def data(payload: bytes) -> bytes:
    """An event of JSON text."""
    return b"data: %b\n\n" % payload


def comment(text: str) -> bytes:
    """What clients skip."""
    return f": {text}\n\n".encode("ascii")


def error_events(error: ServiceError) -> bytes:
    """How a stream ends that an error ends."""
    return data(error_body(error)) + DONE


class EventStream(Response):
    """Sends what `source` yields: whole events, or comments.

    An error before the first event is an answer of its own, with its status; later ones become `on_error(error)`.
    Comments alone do not begin the answer until `ping_s` seconds of silence have. `source` is closed when the client
    goes away.
    """

    def __init__(
        self,
        source: AsyncGenerator[bytes],
        *,
        ping_s: float,
        headers: Mapping[str, str] | None = None,
        on_error: Callable[[ServiceError], bytes] = error_events,
    ) -> None:
        self._source = source
        self._ping_s = ping_s
        self._extra = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
        self._on_error = on_error
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outbox = _Outbox()
        pump = asyncio.ensure_future(self._pump(outbox))
        gone = asyncio.ensure_future(until_gone(receive))
        gone.add_done_callback(lambda _: outbox.end())
        try:
            if await outbox.wait_for_start(self._ping_s) and outbox.failure:
                await error_response(outbox.failure)(scope, receive, send)
            else:
                await self._write(outbox, send)
        finally:
            pump.cancel()
            gone.cancel()
            await asyncio.gather(pump, gone, return_exceptions=True)

    async def _pump(self, outbox: "_Outbox") -> None:
        try:
            async with contextlib.aclosing(self._source) as source:
                async for event in source:
                    await outbox.put(event)
        except ServiceError as error:
            outbox.failure = error
        except Exception:
            log_failure(_log, "a stream failed")
            outbox.failure = internal_error()
        finally:
            outbox.end()

    async def _write(self, outbox: "_Outbox", send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS + self._extra})
        more = True
        with contextlib.closing(Watch(self._ping_s, outbox.wake)) as silence:
            while more:
                with silence:
                    body = await outbox.take()
                more = not outbox.ended
                if not more and outbox.failure:
                    body += self._on_error(outbox.failure)
                outbox.close()
                await send({"type": "http.response.body", "body": body, "more_body": more})
                outbox.open()


class _Outbox:
    """What is to be sent next. All that comes in one turn of the event loop leaves in one piece.

    It is closed while that is on its way, or enough: what a slow client makes wait then is merged where it is made.
    """

    def __init__(self) -> None:
        self.ended = False
        self.failure: ServiceError | None = None
        self._held: list[bytes] = []
        self._num_bytes = 0
        self._has_begun = False
        self._changed = asyncio.Event()
        self._is_open = asyncio.Event()
        self._is_open.set()

    def close(self) -> None:
        """Takes nothing more."""
        self._is_open.clear()

    def open(self) -> None:
        """Takes more."""
        self._is_open.set()

    async def put(self, event: bytes) -> None:
        """Takes an event in, or waits until it may."""
        if not event:
            return
        await self._is_open.wait()
        self._held.append(event)
        self._num_bytes += len(event)
        if self._num_bytes >= _MOST_BYTES:
            self.close()
        self._has_begun = self._has_begun or event[:1] != b":"
        self._changed.set()

    def end(self) -> None:
        """Nothing more will come."""
        self.ended = True
        self._changed.set()

    async def wait_for_start(self, ping_s: float) -> bool:
        """Returns once there is an event, `ping_s` seconds have passed, or all is over; whether that is so."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ping_s):
                while not self._has_begun and not self.ended:
                    self._changed.clear()
                    await self._changed.wait()
        return self.ended

    def wake(self) -> None:
        """Whoever takes need not wait any longer."""
        self._changed.set()

    async def take(self) -> bytes:
        """All that is held, or that comes first; a ping where it is woken before, nothing where all is over."""
        if not self._held and not self.ended:
            self._changed.clear()
            await self._changed.wait()
        if not self._held:
            return b"" if self.ended else PING
        body = b"".join(self._held)
        self._held.clear()
        self._num_bytes = 0
        return body
