"""SIGTERM and SIGINT as something a poll can wait for."""

import contextlib
import signal
import socket
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Whether the process has been asked to stop, and a readable descriptor that says so to a poll."""

    def __init__(self) -> None:
        self.requested = False
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """Becomes readable at the first signal and stays so."""
        return self._reader.fileno()

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
        self.requested = True
