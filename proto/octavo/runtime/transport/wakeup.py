"""A wakeup of the scheduler's event loop from another thread."""

import contextlib
import socket


class Wakeup:
    """Carries one bit from any thread to an event loop: something has happened. To be closed."""

    def __init__(self) -> None:
        self._has_rung = False
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
        # Last: what is heard before is heard once more, and what is readable is never left so.
        self._has_rung = True

    def heard(self) -> bool:
        """Tells whether it was rung since the last call. Costs nothing where it was not, as at most calls."""
        if not self._has_rung:
            return False
        self._has_rung = False
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass
        return True

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
