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
        self._file = os.open(path, _APPENDING, _MODE)
        # One that is closed must write no more: its number may be another file's by then.
        self._lock = threading.Lock()
        self._is_closed = False
        self._size = os.fstat(self._file).st_size

    def custom_ids(self) -> set[str]:
        """Returns whose lines are there. Cuts off a last line that is not whole. Raises `OSError`."""
        found: set[str] = set()
        whole = 0
        with os.fdopen(os.dup(self._file), "rb") as file:
            file.seek(0)
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
                    rest = rest[os.write(self._file, rest) :]
            except OSError:
                self._cut(self._size)
                raise
            self._size += len(line)

    def close(self) -> None:
        """Closes the file, once it is on the disk. Raises `OSError`."""
        with self._lock:
            self._is_closed = True
            try:
                os.fsync(self._file)
            finally:
                os.close(self._file)

    def _cut(self, size: int) -> None:
        if os.fstat(self._file).st_size > size:
            os.ftruncate(self._file, size)
        self._size = size
