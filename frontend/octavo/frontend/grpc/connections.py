"""Closes idle connections of gRPC where there are too many, as `ConnectionBook` does for HTTP.

gRPC takes connections in by itself, tells nobody, and turns away all above a number. But they are files of this
process: they are found among these, and shut down. Those that carry a call are left alone, which the calls tell.
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
from urllib.parse import unquote

import grpc

from octavo.frontend.access.connections import client_of

Context = grpc.aio.ServicerContext[Any, Any]
_Details = grpc.HandlerCallDetails
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
# An address and a port.
Peer = tuple[str, int]

_FILES: Final = Path("/proc/self/fd")
_INTERVAL_S: Final = 0.25
# Shares of the most connections: from which on some are closed, and until how many are left. New ones find room.
_CROWDED: Final = 0.875
_ROOMY: Final = 0.75
# From which on they are looked at one by one: a little more than one client keeps.
_LOOK: Final = 0.5625
# Into `tcp_info`: milliseconds since data came last.
_LAST_DATA: Final = 52


@dataclass(frozen=True)
class Connection:
    """One, by its file. `silent_ms` is how long nothing has come."""

    fd: int
    peer: Peer
    silent_ms: int


class BusyPeers(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Those with a call that runs. Stands before methods that are coroutines, as `ReadingInterceptor` makes them."""

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
        """Their addresses."""
        return frozenset(filter(None, map(_peer_of, self._calls)))


def superfluous(connections: Collection[Connection], busy: Collection[Peer], most: int) -> Iterator[Connection]:
    """Which to close of so many, where `most` may be: idle ones, the longest silent first, always of the client that
    has most of all; and of one that has more than half of what may be."""
    counts = Counter(client_of(each.peer) for each in connections)
    idle: dict[str, list[Connection]] = {}
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
    """Looks, until cancelled, after the connections at `port`; `others` is how many there are elsewhere. Does nothing
    where the system does not tell of files."""
    if not _FILES.is_dir():
        return
    # Of what was open before there were connections.
    files = len(os.listdir(_FILES)) - others()
    while True:
        await asyncio.sleep(_INTERVAL_S)
        # Cheap, and most of the time all that there is to do.
        if len(os.listdir(_FILES)) - others() - files > most * _LOOK:
            await asyncio.to_thread(_close_superfluous, port, busy.peers(), most)


def _close_superfluous(port: int, busy: frozenset[Peer], most: int) -> None:
    for connection in superfluous(list(_accepted(port, map(int, os.listdir(_FILES)))), busy, most):
        with _duplicate(connection.fd) as found:
            # The file may have become another's meanwhile.
            if found and _connection(connection.fd, found, port) is not None:
                with contextlib.suppress(OSError):
                    found.shutdown(socket.SHUT_RDWR)


def _accepted(port: int, fds: Iterable[int]) -> Iterator[Connection]:
    for fd in fds:
        with _duplicate(fd) as found:
            if found and (connection := _connection(fd, found, port)):
                yield connection


@contextlib.contextmanager
def _duplicate(fd: int) -> Iterator[socket.socket | None]:
    """The file as a socket of its own, where it is one."""
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


def _connection(fd: int, found: socket.socket, port: int) -> Connection | None:
    """What was taken in at that port, if it was."""
    if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type is not socket.SOCK_STREAM:
        return None
    try:
        if found.getsockname()[1] != port:
            return None
        host, peer_port, *_ = found.getpeername()
        info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA + 4)
    except OSError:
        return None
    return Connection(fd, (_plain(host), peer_port), struct.unpack_from("=I", info, _LAST_DATA)[0])


def _peer_of(text: str) -> Peer | None:
    """gRPC's way of writing it: ipv4:127.0.0.1:5, ipv6:[::1]:5."""
    kind, _, address = unquote(text).partition(":")
    host, _, port = address.rpartition(":")
    return (_plain(host.strip("[]")), int(port)) if kind in ("ipv4", "ipv6") and port.isdecimal() else None


def _plain(host: str) -> str:
    """An address of IPv4 is the same where a socket of IPv6 has taken it."""
    return host.partition("%")[0].lower().removeprefix("::ffff:")
