"""Closes idle connections of gRPC where there are too many, as `ConnectionBook` does for HTTP.

gRPC accepts connections by itself, reports none of them, and refuses all above a number. But each connection is a file
of this process: this module finds the connections among the files, and shuts idle ones down. `BusyPeers` knows which
connections carry a call; these stay open.
"""

import asyncio
import contextlib
import os
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc

from octavo.runtime.transport.clients import Peer, client_of, parse_peer, plain

Context = grpc.aio.ServicerContext[Any, Any]
_Details = grpc.HandlerCallDetails
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_FILES: Final = Path("/proc/self/fd")
_INTERVAL_S: Final = 0.25
# Shares of the most connections: above `_CROWDED` some are closed until `_ROOMY` is left, so that new ones find room.
_CROWDED: Final = 0.875
_ROOMY: Final = 0.75
# The share above which connections are looked at one by one: a little more than one client may keep.
_LOOK: Final = 0.5625
# Offset in the kernel's `tcp_info` of the milliseconds since data came last.
_LAST_DATA: Final = 52


@dataclass(frozen=True)
class TcpConnection:
    """Names an accepted connection by its file descriptor. `silent_ms`: milliseconds since data came last."""

    fd: int
    peer: Peer
    silent_ms: int


class BusyPeers(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Counts running calls by the address of their client.

    The methods behind this interceptor must be coroutines, as `ReadingInterceptor` makes them.
    """

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()

    async def intercept_service(
        self, continuation: Callable[[_Details], Awaitable[_Handler]], handler_call_details: _Details
    ) -> _Handler:
        handler = await continuation(handler_call_details)
        return handler and self._counting(handler)

    def _counting(self, handler: Any) -> _Handler:
        kind = "_".join(
            "stream" if is_so else "unary" for is_so in (handler.request_streaming, handler.response_streaming)
        )
        behaviour = getattr(handler, kind)

        async def counted(request: Any, context: Context) -> Any:
            peer = context.peer()
            self._calls[peer] += 1
            try:
                return await behaviour(request, context)
            finally:
                self._calls[peer] -= 1
                if not self._calls[peer]:
                    del self._calls[peer]

        make: Any = getattr(grpc, f"{kind}_rpc_method_handler")
        counting: _Handler = make(counted, handler.request_deserializer, handler.response_serializer)
        return counting

    def peers(self) -> frozenset[Peer]:
        """Returns the addresses of clients with a running call."""
        return frozenset(filter(None, map(parse_peer, self._calls)))


def superfluous(connections: Collection[TcpConnection], busy: Collection[Peer], most: int) -> Iterator[TcpConnection]:
    """Yields the idle connections to close where `most` are allowed, each time the longest silent one of the client
    with the most connections.

    Stops when no client has more than half of `most`, and, if more than `_CROWDED` of `most` were open, `_ROOMY` is
    left. Connections of `busy` peers are counted but never yielded.
    """
    counts = Counter(client_of(each.peer) for each in connections)
    idle: dict[str, list[TcpConnection]] = {}
    for each in sorted(connections, key=lambda each: each.silent_ms):
        if each.peer not in busy:
            idle.setdefault(client_of(each.peer), []).append(each)
    crowded = len(connections) > most * _CROWDED
    while idle:
        client = max(idle, key=lambda client: counts[client])
        if counts[client] <= most // 2 and not (crowded and counts.total() > most * _ROOMY):
            return
        yield idle[client].pop()
        counts[client] -= 1
        if not idle[client]:
            del idle[client]


async def keep_room(port: int, busy: BusyPeers, most: int, others: Callable[[], int]) -> None:
    """Closes superfluous connections at `port`, until cancelled.

    `others` returns the number of connections that the process has open elsewhere. Does nothing on systems without
    /proc/self/fd.
    """
    if not _FILES.is_dir():
        return
    # The number of files that were open before there were connections.
    files = len(os.listdir(_FILES)) - others()
    while True:
        await asyncio.sleep(_INTERVAL_S)
        # Cheap, and most of the time all that there is to do.
        if len(os.listdir(_FILES)) - others() - files > most * _LOOK:
            await asyncio.to_thread(_close_superfluous, port, busy.peers(), most)


def _close_superfluous(port: int, busy: frozenset[Peer], most: int) -> None:
    for connection in superfluous(list(_accepted(port, map(int, os.listdir(_FILES)))), busy, most):
        with _duplicate(connection.fd) as found:
            # The descriptor may belong to another file meanwhile.
            if found and _connection(connection.fd, found, port) is not None:
                with contextlib.suppress(OSError):
                    found.shutdown(socket.SHUT_RDWR)


def _accepted(port: int, fds: Iterable[int]) -> Iterator[TcpConnection]:
    for fd in fds:
        with _duplicate(fd) as found:
            if found and (connection := _connection(fd, found, port)):
                yield connection


@contextlib.contextmanager
def _duplicate(fd: int) -> Iterator[socket.socket | None]:
    """Yields a duplicate of the file `fd` as a socket, None if the file is no socket."""
    try:
        duplicate = os.dup(fd)
    except OSError:
        yield None
        return
    try:
        found = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        yield None
        return
    with found:
        yield found


def _connection(fd: int, found: socket.socket, port: int) -> TcpConnection | None:
    """Returns the connection of the socket `found` if it was accepted at `port`."""
    if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type is not socket.SOCK_STREAM:
        return None
    try:
        if found.getsockname()[1] != port:
            return None
        host, peer_port, *_ = found.getpeername()
        info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA + 4)
    except OSError:
        return None
    return TcpConnection(fd, (plain(host), peer_port), struct.unpack_from("=I", info, _LAST_DATA)[0])
