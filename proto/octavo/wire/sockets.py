"""Every ZMQ socket of Octavo is made here, with the same guards."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import zmq

from octavo.wire.base import MAX_MESSAGE_BYTES

S = TypeVar("S", bound="zmq.Socket[Any]")

# A sender that gets this far ahead of its reader is told so instead of filling memory.
_HIGH_WATER_MARK = 4096
_HEARTBEAT_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 6_000
_HANDSHAKE_MS = 5_000
_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 1_000


def bind_router(context: "zmq.Context[S]", endpoint: str) -> S:
    """The scheduler's end of a wire. Sending to a peer that has gone raises `zmq.ZMQError` (EHOSTUNREACH)."""
    socket = _guarded(context, zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    with _closed_on_error(socket):
        socket.bind(endpoint)
    return socket


def connect_dealer(context: "zmq.Context[S]", endpoint: str) -> S:
    """A frontend's or worker's end of a wire. Nothing queues while the scheduler is away: a send that cannot leave
    raises `zmq.Again` (with `zmq.NOBLOCK`)."""
    socket = _guarded(context, zmq.DEALER)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    with _closed_on_error(socket):
        socket.connect(endpoint)
    return socket


@contextmanager
def _closed_on_error(socket: "zmq.Socket[Any]") -> Iterator[None]:
    try:
        yield
    except zmq.ZMQError:
        socket.close()
        raise


def _guarded(context: "zmq.Context[S]", kind: int) -> S:
    socket = context.socket(kind)
    # Unbounded by default: a nine-byte header that claims 4 GiB would make the receiver reserve them.
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    return socket
