"""SIGTERM and SIGINT as something a poll can wait for."""

import contextlib
import signal
import socket
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Whether the process has been asked to stop, and asked again (`insisted`); and a readable descriptor that says so
    to a poll."""

    def __init__(self) -> None:
        self.requested = False
        self.insisted = False
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)

    def fileno(self) -> int:
        """Becomes readable at a signal and stays so until `noticed`."""
        return self._reader.fileno()

    def noticed(self) -> None:
        """The descriptor is quiet until the next signal."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(64)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Takes over both signals inside the block. Only for the main thread."""
        earlier = [(number, signal.signal(number, self._note)) for number in _SIGNALS]
        # Without it a signal would be seen only after the poll it interrupts has run its time.
        earlier_descriptor = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(earlier_descriptor)
            for number, handler in earlier:
                signal.signal(number, handler)
            self._reader.close()
            self._writer.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.insisted = self.requested
        self.requested = True
