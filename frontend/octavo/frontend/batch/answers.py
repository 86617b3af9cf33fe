"""Keeps the answers of one batch in files that only grow: what is in them is never asked again."""

import errno
import os
import threading
from pathlib import Path
from typing import Final

import msgspec

_MODE: Final = 0o600
_APPENDING: Final = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class _Answered(msgspec.Struct, gc=False):
    custom_id: str


_decode = msgspec.json.Decoder(_Answered).decode


class AnswerFile:
    """Appends lines to a file, each whole or not at all. Any thread may use it."""

    def __init__(self, path: Path) -> None:
        """Opens the file, and makes it where it is not there. Raises `OSError`."""
        self._file = os.fdopen(os.open(path, _APPENDING, _MODE), "a+b", buffering=0)
        self._path = path
        # One that is closed must not be written to, and threads may come late.
        self._lock = threading.Lock()
        self._is_closed = False
        self._size = os.fstat(self._file.fileno()).st_size

    def custom_ids(self) -> set[str]:
        """Returns whose lines are there. Cuts off a last line that is not whole. Raises `OSError`."""
        found: set[str] = set()
        whole = 0
        with self._path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    whole += len(line)
                    found.add(_decode(line).custom_id)
        self._cut(whole)
        return found

    def append(self, line: bytes) -> None:
        """Writes a line. Raises `OSError`, and then the file is as before."""
        with self._lock:
            if self._is_closed:
                raise OSError(errno.EBADF, "the file is closed")
            rest = memoryview(line)
            try:
                while rest:
                    rest = rest[self._file.write(rest) or 0 :]
            except OSError:
                self._cut(self._size)
                raise
            self._size += len(line)

    def sync(self) -> None:
        """Returns when all lines are on the disk. Raises `OSError`."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file; what comes late is not written."""
        with self._lock:
            self._is_closed = True
            self._file.close()

    def _cut(self, size: int) -> None:
        if os.fstat(self._file.fileno()).st_size > size:
            self._file.truncate(size)
        self._size = size
