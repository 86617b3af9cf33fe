"""The scheduler's end of the worker wire in a test's own hands: it says what the test says, and nothing else."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import zmq

from octavo.runtime.transport.sockets import bind_router
from octavo.wire.base import Message
from octavo.wire.codec import decode_from_worker, encode
from octavo.wire.steps import FromWorker

M = TypeVar("M", bound=Message)

DEADLINE_S = 60.0


class ScriptedScheduler:
    """Talks to one worker, the last it heard from, over one ROUTER."""

    def __init__(self, socket: "zmq.Socket[Any]") -> None:
        self._socket = socket
        self._identity = b""

    def receive(self) -> FromWorker:
        """Receives the next message. Raises `TimeoutError` if none comes in time."""
        if not self._socket.poll(int(DEADLINE_S * 1000)):
            raise TimeoutError(f"the worker said nothing for {DEADLINE_S} s")
        self._identity, frame = self._socket.recv_multipart()
        return decode_from_worker(frame)

    def rest(self) -> list[FromWorker]:
        """Returns the messages of an ended worker that are left to be received."""
        found = []
        while self._socket.poll(0):
            found.append(self.receive())
        return found

    def wait_for(self, kind: type[M]) -> M:
        """The next message of `kind`, whatever comes before it."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            message = self.receive()
            if isinstance(message, kind):
                return message
        raise TimeoutError(f"no {kind.__name__} within {DEADLINE_S} s")

    def send(self, message: Message) -> None:
        self.send_frames(encode(message))

    def send_frames(self, *frames: bytes) -> None:
        self._socket.send_multipart([self._identity, *frames])


@contextmanager
def scripted_scheduler(endpoint: str) -> Iterator[ScriptedScheduler]:
    """A scheduler bound to `endpoint` inside the block; its end looks like a killed process."""
    with zmq.Context() as context, bind_router(context, endpoint) as socket:
        yield ScriptedScheduler(socket)
