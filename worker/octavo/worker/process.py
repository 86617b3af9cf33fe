"""The worker's process: a stop signal that a poll can wait for, a record of how the process ends, and its CPU cores.

The record tells the next process of the same name how this one ended. It is a file in the runtime directory, which
outlives the process and, where that is on a volume, its container. A process that is welcomed by a scheduler writes
its id there. If it crashes, the interpreter's fault handler adds the cause, and an uncaught error is added too; if it
leaves in order, the file is removed. A process that is killed from outside writes nothing: the supervisor that
started it may know more (`octavo.runtime.process.ends`).
"""

import contextlib
import faulthandler
import math
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TextIO

from octavo.runtime.process.ends import End, read_ends
from octavo.runtime.telemetry.optional import LAST_WORDS, tolerated
from octavo.wire.steps import Ending, Predecessor

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


_MAX_DETAIL = 200
_ENCODING = "utf-8"
_CGROUP = Path("/sys/fs/cgroup")


class StopSignal:
    """Tells whether the process was asked to stop (`requested`) and asked again (`insisted`), and has a descriptor for
    a poll."""

    def __init__(self) -> None:
        self.requested = False
        self.insisted = False
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)

    def fileno(self) -> int:
        """Returns a descriptor that becomes readable at a signal and stays readable until `noticed`."""
        return self._reader.fileno()

    def noticed(self) -> None:
        """Makes the descriptor quiet until the next signal."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(64)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handles SIGTERM and SIGINT inside the block. It must run on the main thread."""
        earlier = [(number, signal.signal(number, self._note)) for number in _SIGNALS]
        # Without this descriptor a signal would be seen only after the poll that it interrupts has run its time.
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


class LastWords:
    """Reads how the `predecessor` ended and records how this process ends. Failures of the record itself are
    tolerated."""

    def __init__(self, path: Path, environment: Mapping[str, str] = os.environ) -> None:
        self.predecessor = _predecessor(path, read_ends(environment))
        self._path = path
        self._file: TextIO | None = None

    def begin(self, process: int) -> None:
        """Begins the record of this process, which serves as `process` from now on."""
        if self._file is not None:
            return
        with tolerated(LAST_WORDS, "how this process ends can be told to nobody"):
            self._file = self._path.open("w", encoding=_ENCODING)
            self._file.write(f"{process} {os.getpid()}\n")
            self._file.flush()
            faulthandler.enable(self._file, all_threads=False)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Records an error that ends the block; removes the record if the block ends without one."""
        try:
            yield
        except Exception as error:
            self._say(f"{type(error).__name__}: {error}")
            raise
        else:
            # A process that was never welcomed leaves the record that it found.
            if self._file is not None:
                with contextlib.suppress(OSError):
                    self._path.unlink(missing_ok=True)
        finally:
            if self._file is not None:
                faulthandler.disable()
                # Closing writes what is still buffered.
                with contextlib.suppress(OSError):
                    self._file.close()

    def _say(self, words: str) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.write(" ".join(words.split())[:_MAX_DETAIL] + "\n")
                self._file.flush()


def _predecessor(path: Path, ends: Mapping[int, End]) -> Predecessor | None:
    try:
        first, *words = path.read_text(encoding=_ENCODING, errors="replace").splitlines()
        process, pid = map(int, first.split())
    except (OSError, ValueError):
        return None
    said = next((line.strip() for line in words if line.strip()), "")[:_MAX_DETAIL]
    end = ends.get(pid)
    if end is not None:
        ending = Ending.CRASHED if said or end.is_crash else Ending.KILLED
        return _predecessor_of(process, ending, f"{end}, {said}" if said else str(end))
    if said:
        return _predecessor_of(process, Ending.CRASHED, said)
    return _predecessor_of(process, Ending.UNKNOWN, "it ended without a word")


def _predecessor_of(process: int, ending: Ending, detail: str) -> Predecessor | None:
    return Predecessor(process, ending, detail) if 0 <= process < 2**64 else None


def available_cores(cgroup: Path = _CGROUP) -> int:
    """Returns the number of whole cores; a quota of 1.5 counts as 2, for a thread per core may then still run at
    times."""
    pinned = len(os.sched_getaffinity(0))
    quota = _quota(cgroup)
    return pinned if quota is None else max(1, min(pinned, math.ceil(quota)))


def _quota(cgroup: Path) -> float | None:
    """Returns the cgroup's limit in cores, or None for no limit: version 2's `cpu.max`, else version 1's pair of
    files."""
    try:
        quota, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
        except OSError:
            return None
    # "max", and -1 in version 1, are no limit.
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None
