"""Serves the HTTP port: runs uvicorn in the frontend's event loop, with limits on everything that clients send."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

from octavo.frontend.access.connections import ConnectionBook, Place, connections_that_fit
from octavo.frontend.access.tls import ssl_context_of
from octavo.frontend.config import FrontendConfig
from octavo.frontend.http.envelope import Envelope
from octavo.frontend.http.protocol import HttpProtocol
from octavo.runtime.transport.clients import client_of
from octavo.runtime.transport.endpoints import EndpointError

_log = logging.getLogger(__name__)

_HANDSHAKE_S: Final = 10.0
# Connections accepted in one turn of the event loop: each brings a request to read, and other clients wait meanwhile.
# The system keeps the rest, in order.
_AT_ONCE: Final = 4
# Seconds until accepting is tried again where the system has no file left.
_PAUSE_S: Final = 0.1


class Acceptor:
    """Accepts connections at `listener`, which does not block, from `start` to `close`.

    Each connection is counted in `book` before a byte of it is read, so those in their TLS handshake count, too.
    """

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
        """Begins to accept. Connections made before have waited in the system's queue."""
        self._pause = None
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Stops accepting, and drops connections in their TLS handshake."""
        if self._pause:
            self._pause.cancel()
        asyncio.get_running_loop().remove_reader(self._listener)
        for task in self._entering:
            task.cancel()

    async def wait_closed(self) -> None:
        """Returns when no connection is in its TLS handshake any more."""
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
        task.add_done_callback(partial(self._entered, accepted, place))

    def _entered(self, accepted: socket.socket, place: Place, task: asyncio.Task[None]) -> None:
        self._entering.discard(task)
        # One that is cancelled before its first step cannot tidy up itself.
        if task.cancelled():
            place.leave()
            accepted.close()

    async def _connect(self, accepted: socket.socket, place: Place) -> None:
        timeout_s = _HANDSHAKE_S if self._tls else None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._make_protocol(place), accepted, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except OSError:
            # Why a handshake failed is for the client to know, not for the log.
            place.leave()
            accepted.close()


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


# Seconds after which idle connections are closed; longer than most proxies keep theirs.
_KEEP_ALIVE_S: Final = 75
# Seconds that responses get to be sent once nothing is computed for them any more.
_STOP_GRACE_S: Final = 1
# Connections that wait to be accepted, if the system allows: a client that finds no room tries again a second later.
_BACKLOG: Final = 4096
# Bytes that the system holds for a client that does not read.
_SEND_BUFFER: Final = 128 << 10
_MAX_PORT: Final = 65535
_PASSIVE: Final = socket.AI_PASSIVE


class HttpServer:
    """Serves `app` at `config.http_listen`.

    `port` is the bound port, for `http_listen` may leave the choice to the system; 0 for a unix socket.
    """

    def __init__(self, app: ASGIApp, config: FrontendConfig) -> None:
        """Binds the address. Raises `EndpointError` if that fails, `TlsError` for unusable PEM files."""
        self._socket = _bind(config.http_listen)
        is_unix = self._socket.family is socket.AF_UNIX
        self.port = 0 if is_unix else int(self._socket.getsockname()[1])
        # The envelope is outermost, so that refusals have an id, too.
        self._uvicorn = uvicorn.Server(_settings(Envelope(app), config))
        self._empty = asyncio.Event()
        self._book = ConnectionBook(connections_that_fit(config.max_connections), self._empty.set)
        # uvicorn's own would not count connections in their TLS handshake.
        self._acceptor = Acceptor(self._socket, self._book, self._protocol, self._uvicorn.config.ssl)
        self._dating: asyncio.Task[None] | None = None

    @property
    def connections(self) -> set[Any]:
        """Returns the open connections."""
        return self._uvicorn.server_state.connections

    async def start(self) -> None:
        """Begins to serve. Connections made since the address was bound have waited."""
        # Of uvicorn's server only its loop runs, which sets the date of responses.
        self._dating = asyncio.create_task(self._uvicorn.main_loop())
        self._acceptor.start()

    async def stop(self) -> None:
        """Stops accepting, gives responses `_STOP_GRACE_S` seconds to end, and cuts off the rest. Idempotent."""
        dating, self._dating = self._dating, None
        if dating:
            self._acceptor.close()
            # Who comes now is refused by the system, and may go elsewhere at once.
            self._socket.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_GRACE_S):
                    await self._end_connections()
            dating.cancel()
        for task in self._uvicorn.server_state.tasks:
            task.cancel()
        for connection in list(self.connections):
            connection.transport.abort()
        self._socket.close()

    async def _end_connections(self) -> None:
        """Closes each connection once its response is sent. Returns when all are closed and their handlers done."""
        for connection in list(self.connections):
            connection.shutdown()
        while len(self._book):
            self._empty.clear()
            await self._empty.wait()
        await self._acceptor.wait_closed()
        if tasks := self._uvicorn.server_state.tasks:
            await asyncio.wait(tasks)

    def _protocol(self, place: Place) -> asyncio.Protocol:
        make: Any = self._uvicorn.config.http_protocol_class
        protocol: asyncio.Protocol = make(
            config=self._uvicorn.config, server_state=self._uvicorn.server_state, app_state={}, place=place
        )
        return protocol


def _settings(app: ASGIApp, config: FrontendConfig) -> uvicorn.Config:
    tls = ssl_context_of(config)
    settings = uvicorn.Config(
        app,
        http=partial(HttpProtocol, stall_timeout_s=config.stall_timeout_s),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        # Mistakes of clients are for them to know, not for the log.
        log_level=logging.ERROR,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        ssl_context_factory=(lambda *_: tls) if tls else None,
    )
    settings.load()
    return settings


def _bind(listen: str) -> socket.socket:
    family, protocol, address = _address(listen)
    listener = socket.socket(family, socket.SOCK_STREAM, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _unusable(listen, error) from error
    return listener


def _address(listen: str) -> tuple[int, int, Any]:
    """Returns family, protocol and address of `listen`. asyncio sends small pieces at once for protocol TCP alone."""
    if listen.startswith("unix:"):
        path = Path(listen.removeprefix("unix:"))
        # The process that serves has claimed the path, so a socket there is of a process that has ended.
        if path.is_socket():
            path.unlink()
        return socket.AF_UNIX, 0, str(path)
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal() or int(port) > _MAX_PORT:
        raise _unusable(listen, "it is neither host:port nor unix:path")
    try:
        [found, *_] = socket.getaddrinfo(host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=_PASSIVE)
    except OSError as error:
        raise _unusable(listen, error) from error
    return found[0], found[2], found[4]


def _unusable(listen: str, why: object) -> EndpointError:
    return EndpointError(f"cannot listen on {listen} for HTTP, choose another address: {why}")
