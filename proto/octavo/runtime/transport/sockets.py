"""Makes every ZMQ socket of Octavo, with the same guards."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import zmq
import zmq.backend

from octavo.runtime.transport.curve_keys import ClientKeys, ServerKeys
from octavo.runtime.transport.endpoints import EndpointError
from octavo.runtime.transport.handshakes import (
    domain_of,
    explain_to_client,
    explain_to_server,
    open_gate,
    watch_handshakes,
)
from octavo.wire.base import MAX_MESSAGE_BYTES

S = TypeVar("S", bound="zmq.Socket[Any]")

# A sender that gets this far ahead of its reader is told so instead of filling memory.
_HIGH_WATER_MARK = 4096
_HEARTBEAT_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 6_000
_HANDSHAKE_MS = 5_000
_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 1_000
# For so long a closed socket goes on sending to strangers, whose messages have several frames: where it drops one of
# which the first frames have left, and their reader goes at the same moment, libzmq aborts (its issue 3442).
_FOREIGN_LINGER_MS = 250
# Older ones can be crashed by whoever reaches their port, with keys or without.
_OLDEST_LIBZMQ = (4, 3, 5)


class _PlainSocket(zmq.Socket[bytes]):
    """Sends by the call that pyzmq's own `send` wraps: the wrapper, for kinds of sockets that are not used here, takes
    twice as long as the call."""

    send = zmq.backend.Socket.send  # type: ignore[assignment]


def check_library() -> None:
    """Raises `EndpointError` if the libzmq at hand must not be exposed to a network."""
    if (found := zmq.zmq_version_info()) < _OLDEST_LIBZMQ:
        names = ".".join(map(str, found)), ".".join(map(str, _OLDEST_LIBZMQ))
        raise EndpointError("libzmq is {}, and {} or newer is needed; upgrade pyzmq, which brings it".format(*names))


def bind_router(
    context: "zmq.Context[S]",
    endpoint: str,
    keys: ServerKeys | None = None,
    on_disconnect: Callable[[], None] | None = None,
    *,
    is_foreign: bool = False,
) -> S:
    """Makes the scheduler's end of a wire; with `keys` only for the peers that they admit. Sending to a peer that has
    gone raises `zmq.ZMQError` (EHOSTUNREACH), from about when `on_disconnect` is called, on another thread. One that
    `is_foreign` is for programs that are not Octavo's."""
    socket = _guarded(context, zmq.ROUTER, is_foreign=is_foreign)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    with _closed_on_error(socket):
        if keys:
            _lock(context, socket, keys)
        if keys or on_disconnect:
            watch_handshakes(context, socket, explain_to_server(endpoint, keys), on_disconnect)
        socket.bind(endpoint)
    return socket


def connect_dealer(
    context: "zmq.Context[S]",
    endpoint: str,
    keys: ClientKeys | None = None,
    on_disconnect: Callable[[], None] | None = None,
) -> S:
    """Makes a frontend's or worker's end of a wire.

    Nothing queues while the scheduler is away, or does not let this process in, which is logged: a send that cannot
    leave raises `zmq.Again` (with `zmq.NOBLOCK`). `on_disconnect` is called, on another thread, when a connection has
    ended.
    """
    socket = _guarded(context, zmq.DEALER)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    with _closed_on_error(socket):
        if keys:
            _show(socket, keys)
        watch_handshakes(context, socket, explain_to_client(endpoint, has_keys=keys is not None), on_disconnect)
        socket.connect(endpoint)
    return socket


def make_publisher(context: "zmq.Context[S]", endpoint: str, *, binds: bool) -> S:
    """Makes a socket that publishes to programs that are not Octavo's, which it lets connect, or connects to. Sending
    never waits: what a subscriber does not read in time, it misses."""
    socket = _guarded(context, zmq.PUB, is_foreign=True)
    with _closed_on_error(socket):
        (socket.bind if binds else socket.connect)(endpoint)
    return socket


def connect_stranger(context: "zmq.Context[S]", kind: int, endpoint: str) -> S:
    """Makes the other end of such sockets: a SUB, or a DEALER for a ROUTER that `is_foreign`."""
    socket = _guarded(context, kind, is_foreign=True)
    with _closed_on_error(socket):
        socket.connect(endpoint)
    return socket


def _lock(context: "zmq.Context[S]", socket: S, keys: ServerKeys) -> None:
    open_gate(context)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, domain_of(keys))
    # Else libzmq would let everybody in while there is no gate.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def _show(socket: "zmq.Socket[Any]", keys: ClientKeys) -> None:
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.scheduler)


@contextmanager
def _closed_on_error(socket: "zmq.Socket[Any]") -> Iterator[None]:
    try:
        yield
    except zmq.ZMQError:
        socket.close()
        raise


def _guarded(context: "zmq.Context[S]", kind: int, *, is_foreign: bool = False) -> S:
    check_library()
    # A context of pyzmq's asyncio makes sockets of its own.
    make: Any = _PlainSocket if type(context) is zmq.Context else None
    socket = context.socket(kind, make)
    # Unbounded by default: a nine-byte header that claims 4 GiB would make the receiver reserve them.
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, _FOREIGN_LINGER_MS if is_foreign else 0)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    if is_foreign:
        # Not all that speak ZMTP answer its heartbeats.
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    else:
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    return socket
