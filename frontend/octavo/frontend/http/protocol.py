"""Extends uvicorn's HTTP connection by time limits for slow clients, and by strict framing of requests."""

import asyncio
import logging
import sys
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from octavo.frontend.access.connections import Place
from octavo.frontend.errors import InvalidRequest, Reason
from octavo.frontend.http.bodies import is_upload
from octavo.frontend.http.envelope import MAX_HEADERS
from octavo.frontend.http.errors import error_body

_log = logging.getLogger(__name__)

# The most seconds from the first byte of a request to its last; of an upload, for so many bytes.
REQUEST_S: Final = 10.0
_UPLOAD_STEP: Final = 1 << 20
_AFTERTHOUGHT_S: Final = 0.5


class HttpProtocol(H11Protocol):
    """Closes a connection when a request takes longer than `REQUEST_S` seconds to arrive, or written data longer than
    `stall_timeout_s` seconds to leave."""

    def __init__(self, *args: Any, stall_timeout_s: float, place: Place, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._place = place
        self.conn = _Strict(h11.SERVER, MAX_HEADERS)
        # A little later than the handler's own limit, so that the client learns why its response ends.
        self._stall_timeout_s = stall_timeout_s + _AFTERTHOUGHT_S
        self._arriving: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._came = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._place.close = transport.abort
        self._arriving = self.loop.call_later(REQUEST_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._place.leave()
        self._has_arrived()
        self._is_read()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._arriving is None and self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._arriving = self.loop.call_later(REQUEST_S, self.transport.abort)
        super().data_received(data)
        self._extend_upload(len(data))
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._has_arrived()
            self._note_whether_busy()

    def on_response_complete(self) -> None:
        # Nobody has read what came of the body.
        self.cycle.body = bytearray()
        super().on_response_complete()
        if self.conn.their_state is not h11.SEND_BODY:
            self._has_arrived()
        self._note_whether_busy()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self._stall_timeout_s, self._cut_off)

    def resume_writing(self) -> None:
        self._is_read()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are no readable HTTP request with an error object, and closes the connection."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            # In the midst of a response there is no place for another.
            self.transport.close()
            return
        if self.cycle:
            # The handler that reads the body has nobody to answer.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        status = getattr(sys.exception(), "error_status_hint", 400)
        body = error_body(InvalidRequest(Reason.BAD_PARAMETER, f"this is no HTTP request that can be read ({status})"))
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self._is_refused = True
        if self.transport.can_write_eof():
            # What still comes is read, until the timer ends it: closing before would take the answer away again.
            self.transport.write_eof()
        else:
            self.transport.close()

    def _extend_upload(self, size: int) -> None:
        """Gives an upload whose bytes keep coming further time, as long as its handler takes them."""
        if self._arriving is None or not self.cycle or self.cycle.response_started or not is_upload(self.cycle.scope):
            self._came = 0
            return
        self._came += size
        if self._came >= _UPLOAD_STEP:
            self._came = 0
            self._arriving.cancel()
            self._arriving = self.loop.call_later(REQUEST_S, self.transport.abort)

    def _note_whether_busy(self) -> None:
        """Marks the connection as busy while a complete request is being answered, else as idle."""
        if self.cycle and not self.cycle.more_body and not self.cycle.response_complete:
            self._place.set_busy()
        else:
            self._place.set_idle()

    def _cut_off(self) -> None:
        _log.info("cut off an HTTP client that has not read anything for %g s", self._stall_timeout_s)
        self.transport.abort()

    def _has_arrived(self) -> None:
        if self._arriving:
            self._arriving.cancel()
            self._arriving = None

    def _is_read(self) -> None:
        if self._stalled:
            self._stalled.cancel()
            self._stalled = None


class _Strict(h11.Connection):
    """Refuses a request whose end can be read in two ways: the bytes that one server takes for its body, another server
    may take for the next request."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request) and _has_two_ends(event):
            raise h11.RemoteProtocolError("the length of the body can be read in two ways")
        return event


def _has_two_ends(request: h11.Request) -> bool:
    names = {name for name, _ in request.headers}
    return b"transfer-encoding" in names and (b"content-length" in names or request.http_version < b"1.1")
