"""A wire from any thread to an event loop's poll, for one bit: something has happened."""

import contextlib
import socket


class Wakeup:
    """Rung on any thread, heard by one. To be closed."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)

    def fileno(self) -> int:
        """Readable from the ring on until it is heard."""
        return self._reader.fileno()

    def ring(self) -> None:
        """Once is as good as often; after the end nobody hears it."""
        with contextlib.suppress(OSError):
            self._writer.send(b"!")

    def heard(self) -> bool:
        """Whether it was rung since the last call."""
        try:
            return bool(self._reader.recv(4096))
        except BlockingIOError:
            return False

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
