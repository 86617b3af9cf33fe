"""The event log as a file that may fail: nobody's request waits for it or ends with it."""

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self

from octavo.scheduler.event_log import log_file
from octavo.telemetry.optional import EVENT_LOG, failed

_log = logging.getLogger(__name__)

_CONSEQUENCE = "what comes from now on is not recorded until the scheduler's next start, which begins a new log"


class LogWriter:
    """Writes records to a new file until that fails. As nothing after a gap could be replayed, the log then ends: what
    is in the file is whole but for its last record."""

    def __init__(self, path: Path, epoch: int) -> None:
        self._file: BinaryIO | None = None
        try:
            self._file = _new_file(path, epoch)
        except OSError as error:
            failed(EVENT_LOG, error, _CONSEQUENCE)
            return
        self._append = log_file(self._file)

    def write(self, content: bytes) -> None:
        """Appends one record, while the log goes on."""
        if self._file is None:
            return
        try:
            self._append(content)
        except OSError as error:
            failed(EVENT_LOG, error, _CONSEQUENCE)
            self._end()

    def close(self) -> None:
        """The log is complete."""
        if self._file is None:
            return
        try:
            self._file.flush()
        except OSError as error:
            failed(EVENT_LOG, error, "the last records are missing")
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self) -> None:
        file, self._file = self._file, None
        # What is still buffered cannot be written, and the file is closed all the same.
        if file is not None:
            with suppress(OSError):
                file.close()


def _new_file(path: Path, epoch: int) -> BinaryIO:
    """A file that nobody else may read and that was not there before: an earlier start's keeps its name, and this one's
    gets the epoch added to it. Raises `OSError`."""
    if path.exists():
        path = path.with_name(f"{path.name}.{epoch:016x}")
    _log.info("writing the event log to %s", path)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
