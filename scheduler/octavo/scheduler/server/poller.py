"""Waiting in an event loop for ZMQ sockets, and for a wakeup from another thread: a poll of ZMQ's own would cost more
than most messages."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import zmq


class Wakeup:
    """Carries one bit from any thread to an event loop: something has happened. To be closed."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)

    def fileno(self) -> int:
        """Returns a descriptor that is readable from the ring on until it is heard."""
        return self._reader.fileno()

    def ring(self) -> None:
        """Wakes the loop; rings before it hears count as one. Does nothing once the wakeup is closed."""
        with contextlib.suppress(OSError):
            self._writer.send(b"!")

    def heard(self) -> bool:
        """Tells whether it was rung since the last call."""
        try:
            return bool(self._reader.recv(4096))
        except BlockingIOError:
            return False

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class Readable(Protocol):
    """An object that can be waited for until it is readable."""

    def fileno(self) -> int: ...


class SocketPoller:
    """Waits for sockets to become readable. `watching` makes one."""

    def __init__(self, sockets: "Sequence[zmq.Socket[bytes]]") -> None:
        self._sockets = sockets
        self.arrived = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        """Waits until something is there to be read, at most `seconds`; always lets other tasks run meanwhile."""
        self.arrived.clear()
        # A descriptor reports only changes since its socket was last used, and sending is a use.
        if any(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN for socket in self._sockets):
            await asyncio.sleep(0)
            return
        late = asyncio.get_running_loop().call_later(seconds, self.arrived.set)
        await self.arrived.wait()
        late.cancel()


@contextmanager
def watching(sockets: "Sequence[zmq.Socket[bytes]]", *others: Readable) -> Iterator[SocketPoller]:
    """Makes a poller of messages of `sockets` and of `others`, inside the block and in the running event loop."""
    loop, arrivals = asyncio.get_running_loop(), SocketPoller(sockets)
    descriptors = [watched.fileno() for watched in (*sockets, *others)]
    for descriptor in descriptors:
        loop.add_reader(descriptor, arrivals.arrived.set)
    try:
        yield arrivals
    finally:
        for descriptor in descriptors:
            loop.remove_reader(descriptor)
