"""Sends responses while they are being made: server-sent events, and long bodies in slices."""

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
    """Sends the slices that `source` yields, without a content-length: one slice is held at a time.

    `source` is closed when the client goes away.
    """

    def __init__(self, source: AsyncGenerator[bytes], *, headers: Mapping[str, str], media_type: str) -> None:
        self.source = source
        self._head = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        self._head.append((b"content-type", media_type.encode("latin-1")))
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(until_gone(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self._head})
            async with contextlib.aclosing(self.source) as source:
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


# Bytes that are sent in one piece; the event that passes this bound is still part of the piece.
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
    """Returns an event of JSON text."""
    return b"data: %b\n\n" % payload


def comment(text: str) -> bytes:
    """Returns a comment, which clients skip. `text` is ASCII."""
    return f": {text}\n\n".encode("ascii")


def error_events(error: ServiceError) -> bytes:
    """Returns the last events of a stream that `error` ends."""
    return data(error_body(error)) + DONE


class EventStream(Response):
    """Sends what `source` yields: whole events, or comments.

    An error before the first event becomes a response with the error's status; a later error is sent as
    `on_error(error)`. Comments alone do not begin the response before `ping_s` seconds have passed. After `ping_s`
    seconds of silence `ping` says that the stream is alive. `source` is closed when the client goes away.
    """

    def __init__(
        self,
        source: AsyncGenerator[bytes],
        *,
        ping_s: float,
        headers: Mapping[str, str] | None = None,
        on_error: Callable[[ServiceError], bytes] = error_events,
        ping: bytes = PING,
    ) -> None:
        self.source = source
        self._ping_s = ping_s
        self._ping = ping
        self._extra = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
        self._on_error = on_error
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outbox = _Outbox(self._ping)
        pump = asyncio.ensure_future(self._pump(outbox))
        gone = asyncio.ensure_future(until_gone(receive))
        gone.add_done_callback(lambda _: outbox.end())
        try:
            if await outbox.wait_for_start(self._ping_s) and outbox.failure:
                await error_response(outbox.failure, scope)(scope, receive, send)
            else:
                await self._write(outbox, send)
        finally:
            pump.cancel()
            gone.cancel()
            await asyncio.gather(pump, gone, return_exceptions=True)

    async def _pump(self, outbox: "_Outbox") -> None:
        try:
            async with contextlib.aclosing(self.source) as source:
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
    """Holds what is to be sent next. Events that come in one turn of the event loop leave in one piece.

    The outbox is closed while a piece is on its way, or when it holds `_MOST_BYTES`: events that a slow client makes
    wait are merged in the source.
    """

    def __init__(self, ping: bytes) -> None:
        self._ping = ping
        self.ended = False
        self.failure: ServiceError | None = None
        self._held: list[bytes] = []
        self._num_bytes = 0
        self._has_begun = False
        self._is_open = True
        # What the one that puts, and the one that takes, wait for now: `asyncio.Event` would cost more than all else.
        self._opened: asyncio.Future[None] | None = None
        self._changed: asyncio.Future[None] | None = None

    def close(self) -> None:
        """Makes `put` wait."""
        self._is_open = False

    def open(self) -> None:
        """Lets `put` go on."""
        self._is_open = True
        if self._opened is not None and not self._opened.done():
            self._opened.set_result(None)

    async def put(self, event: bytes) -> None:
        """Adds an event, once the outbox is open. Ignores an empty one."""
        if not event:
            return
        while not self._is_open:
            self._opened = asyncio.get_running_loop().create_future()
            await self._opened
        self._held.append(event)
        self._num_bytes += len(event)
        if self._num_bytes >= _MOST_BYTES:
            self.close()
        self._has_begun = self._has_begun or event[:1] != b":"
        self.wake()

    def end(self) -> None:
        """Marks that nothing more will come."""
        self.ended = True
        self.wake()

    async def wait_for_start(self, ping_s: float) -> bool:
        """Waits until there is an event, `ping_s` seconds have passed, or all is over. Returns whether all is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ping_s):
                while not self._has_begun and not self.ended:
                    self._changed = asyncio.get_running_loop().create_future()
                    await self._changed
        return self.ended

    def wake(self) -> None:
        """Ends the wait of `take`."""
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def take(self) -> bytes:
        """Waits for an event, and returns all that is held: a ping after `wake`, nothing where all is over."""
        if not self._held and not self.ended:
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed
        if not self._held:
            return b"" if self.ended else self._ping
        body = b"".join(self._held)
        self._held.clear()
        self._num_bytes = 0
        return body
