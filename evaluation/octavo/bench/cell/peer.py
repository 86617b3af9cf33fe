"""One end of a wire to the scheduler, read without waiting."""

import contextlib

import zmq

from octavo.runtime.transport.sockets import connect_dealer
from octavo.wire.base import Message
from octavo.wire.codec import encode


class Peer:
    """Connected, and welcome once it knows the scheduler's `epoch`."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> None:
        self.socket = connect_dealer(context, endpoint)
        self.epoch: int | None = None

    def receive(self) -> bytes | None:
        """The next frame, if one is there."""
        try:
            return self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def send(self, message: Message) -> int:
        """How many bytes it took. Raises `zmq.Again` if the scheduler is away."""
        frame = encode(message)
        self.socket.send(frame, zmq.NOBLOCK)
        return len(frame)

    def call(self, hello: Message) -> None:
        """Sends what is sent again and again until there is a scheduler."""
        with contextlib.suppress(zmq.Again):
            self.send(hello)
