"""Takes connections in for an asyncio protocol. They are counted before a byte is read, so those whose TLS handshake
has not ended count, too."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Final

from octavo.frontend.access.connections import ConnectionBook, Place, client_of

_log = logging.getLogger(__name__)

_HANDSHAKE_S: Final = 10.0
# Taken in one turn of the event loop: each brings a request to read, and others wait meanwhile. The rest is kept by the
# system, in order.
_AT_ONCE: Final = 4
# Until it is tried again where the system has no file left.
_PAUSE_S: Final = 0.1


class Acceptor:
    """Serves `listener`, which does not block, from `start` to `close`."""

    def __init__(
        self,
        listener: socket.socket,
        book: ConnectionBook,
        make_protocol: Callable[[Place], asyncio.Protocol],
        tls: ssl.SSLContext | None,
    ) -> None:
        self._listener = listener
        self._book = book
        self._make_protocol = make_protocol
        self._tls = tls
        self._entering: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Connections made before have waited for it."""
        self._pause = None
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Takes no more."""
        if self._pause:
            self._pause.cancel()
        asyncio.get_running_loop().remove_reader(self._listener)
        for task in self._entering:
            task.cancel()

    async def wait_closed(self) -> None:
        """Returns when none is in between any more."""
        await asyncio.gather(*self._entering, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.error("cannot take a connection: %s", error)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener)
                self._pause = loop.call_later(_PAUSE_S, self.start)
                return
            self._enter(accepted, address)

    def _enter(self, accepted: socket.socket, address: object) -> None:
        place = self._book.enter(client_of(address), lambda: _cut(accepted))
        if place is None:
            accepted.close()
            return
        accepted.setblocking(False)
        if accepted.family is not socket.AF_UNIX:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = asyncio.get_running_loop().create_task(self._connect(accepted, place))
        self._entering.add(task)
        task.add_done_callback(self._entering.discard)

    async def _connect(self, accepted: socket.socket, place: Place) -> None:
        timeout_s = _HANDSHAKE_S if self._tls else None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._make_protocol(place), accepted, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except (OSError, asyncio.CancelledError):
            # What ends in its handshake is the client's to know.
            place.leave()
            accepted.close()


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
