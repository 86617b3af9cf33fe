"""A network that loses and delays single messages, which TCP itself never does: for ZMTP 3 without encryption."""

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from random import Random
from typing import Final

_GREETING_BYTES: Final = 64
_MORE, _LONG, _COMMAND = 1, 2, 4


@dataclass
class Noise:
    """Loses this share of the messages, and delivers the others so many seconds late. Handshakes and the sockets' own
    heartbeats are never lost. May be changed at any time."""

    loss: float = 0.0
    delay_s: float = 0.0
    random: Random = field(default_factory=lambda: Random(0))
    lost: int = 0
    carried: int = 0

    def carry(self, source: socket.socket, target: socket.socket) -> None:
        """One direction of a connection, in order, to its end."""
        arrivals: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
        delivery = threading.Thread(target=_deliver, args=(arrivals, target), daemon=True)
        delivery.start()
        try:
            for message, is_command in messages(source):
                if is_command or self._survives():
                    arrivals.put((time.monotonic() + self.delay_s, message))
        finally:
            arrivals.put((0.0, b""))
            delivery.join()

    def _survives(self) -> bool:
        if self.random.random() < self.loss:
            self.lost += 1
            return False
        self.carried += 1
        return True


def messages(source: socket.socket) -> Iterator[tuple[bytes, bool]]:
    """What comes from a peer, as it is on the wire: the greeting piece by piece, then one message or command after the
    other. With each, whether it is none of ours but libzmq's own."""
    remaining = _GREETING_BYTES
    # Each peer waits for the beginning of the other's before it sends the rest.
    while remaining and (piece := source.recv(remaining)):
        remaining -= len(piece)
        yield piece, True
    with source.makefile("rb") as stream:
        message = b""
        while flags := stream.read(1):
            length = stream.read(8 if flags[0] & _LONG else 1)
            message += flags + length + stream.read(int.from_bytes(length))
            if not flags[0] & _MORE:
                yield message, bool(flags[0] & _COMMAND)
                message = b""


def _deliver(arrivals: "SimpleQueue[tuple[float, bytes]]", target: socket.socket) -> None:
    while True:
        due, message = arrivals.get()
        if not message:
            return
        if (seconds := due - time.monotonic()) > 0:
            time.sleep(seconds)
        try:
            target.sendall(message)
        except OSError:
            return
