"""Takes messages from ZMQ sockets and hands others to them without waiting, in as few calls as the library allows: what
it has for messages of several frames costs several times as much as the frames."""

from typing import Any, Final

import zmq

# Plain numbers: the flags of the library are enumerations, whose arithmetic costs more than the calls that take them.
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_POLLOUT: Final = int(zmq.POLLOUT)
_NOBLOCK: Final = int(zmq.NOBLOCK)
_NOBLOCK_MORE: Final = _NOBLOCK | int(zmq.SNDMORE)


def has_arrived(socket: "zmq.Socket[Any]") -> bool:
    """Tells whether there is a message to receive."""
    events: Any = socket.getsockopt(_EVENTS)
    return bool(events & _POLLIN)


def may_send(socket: "zmq.Socket[Any]") -> bool:
    """Tells whether a message would leave."""
    events: Any = socket.getsockopt(_EVENTS)
    return bool(events & _POLLOUT)


def receive(socket: "zmq.Socket[Any]") -> list[bytes]:
    """Returns the frames of a message that has arrived. Raises `zmq.Again` if none has."""
    frames = []
    is_last = False
    while not is_last:
        frame = socket.recv(_NOBLOCK, copy=False)
        frames.append(frame.bytes)
        is_last = not frame.more
    return frames


def send(socket: "zmq.Socket[Any]", frame: bytes) -> None:
    """Sends a message of one frame. Raises `zmq.ZMQError` if it cannot leave now."""
    socket.send(frame, _NOBLOCK)


def send_to(socket: "zmq.Socket[Any]", connection: bytes, frame: bytes) -> None:
    """Sends a message of one frame over a connection of a ROUTER. Raises `zmq.ZMQError` if it cannot leave now."""
    socket.send(connection, _NOBLOCK_MORE)
    socket.send(frame, _NOBLOCK)
