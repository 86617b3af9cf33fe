"""What a worker asks of its process: a stop signal that a poll can wait for, last words for the next of its name, and
its CPU cores."""

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


# What is left of a worker that has died, for the next of its name: which process it was, and how it came to its end.
#
# A file in the runtime directory, which outlives the process and, where that is on a volume, its container. A process
# that is welcomed by a scheduler writes its name there. If it crashes, the interpreter's fault handler adds what ended
# it, and an error that nobody has caught is added too; if it leaves in order, the file is removed. What is killed from
# outside says nothing: whoever started it may know more (`octavo.runtime.process.ends`).


_MAX_DETAIL = 200
_ENCODING = "utf-8"


class LastWords:
    """Those of the process before, and the place for this one's own. Nothing that goes wrong with them matters."""

    def __init__(self, path: Path, environment: Mapping[str, str] = os.environ) -> None:
        self.predecessor = _predecessor(path, read_ends(environment))
        self._path = path
        self._file: TextIO | None = None

    def begin(self, process: int) -> None:
        """This process serves from now on, under this name."""
        if self._file is not None:
            return
        with tolerated(LAST_WORDS, "how this process ends can be told to nobody"):
            self._file = self._path.open("w", encoding=_ENCODING)
            self._file.write(f"{process} {os.getpid()}\n")
            self._file.flush()
            faulthandler.enable(self._file, all_threads=False)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Writes down an error that ends the block; and if none does, that nothing is left to be told."""
        try:
            yield
        except Exception as error:
            self._say(f"{type(error).__name__}: {error}")
            raise
        else:
            # One that was never welcomed leaves what it has found.
            if self._file is not None:
                with contextlib.suppress(OSError):
                    self._path.unlink(missing_ok=True)
        finally:
            if self._file is not None:
                faulthandler.disable()
                # Which writes what is left.
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
        return _told(process, ending, f"{end}, {said}" if said else str(end))
    if said:
        return _told(process, Ending.CRASHED, said)
    return _told(process, Ending.UNKNOWN, "it ended without a word")


def _told(process: int, ending: Ending, detail: str) -> Predecessor | None:
    return Predecessor(process, ending, detail) if 0 <= process < 2**64 else None


# How many CPU cores this process may use: what it is pinned to, less where a cgroup says so.


_CGROUP = Path("/sys/fs/cgroup")


def available_cores(cgroup: Path = _CGROUP) -> int:
    """Whole cores; a quota of one and a half counts as two, for a thread per core may then still run at times."""
    pinned = len(os.sched_getaffinity(0))
    quota = _quota(cgroup)
    return pinned if quota is None else max(1, min(pinned, math.ceil(quota)))


def _quota(cgroup: Path) -> float | None:
    """Cores' worth of time per time that the cgroup grants: version 2's `cpu.max`, else version 1's pair of files."""
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
