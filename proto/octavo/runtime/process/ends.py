"""Tells how processes have ended, by a crash or from outside: a supervisor writes it down, the next process reads
it."""

import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

# What a supervisor knows of the processes that had a worker's place before it.
ENDS_VARIABLE: Final = "OCTAVO_ENDS_BEFORE"
# What a process does to itself. Whatever else ends one comes from outside.
_CRASHES: Final = frozenset(
    {
        *(signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL),
        *(signal.SIGFPE, signal.SIGSYS, signal.SIGTRAP, signal.SIGXCPU, signal.SIGXFSZ),
    }
)


class End(NamedTuple):
    """Records the end of a process: its status, negative for a signal, and whether the kernel has killed a process of
    the same group for want of memory since the last end."""

    pid: int
    status: int
    is_out_of_memory: bool = False

    @property
    def is_crash(self) -> bool:
        """Returns whether the process ended by its own doing."""
        if self.status == -signal.SIGKILL:
            return self.is_out_of_memory
        return self.status > 0 or -self.status in _CRASHES

    def __str__(self) -> str:
        if self.status == -signal.SIGKILL and self.is_out_of_memory:
            return "killed by the kernel for want of memory"
        return describe_status(self.status)


def describe_status(status: int) -> str:
    """Returns an exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def write_ends(ends: Iterable[End]) -> str:
    """Returns the text that `read_ends` reads from the next process's environment."""
    return ",".join(f"{end.pid}:{end.status}:{int(end.is_out_of_memory)}" for end in ends)


def read_ends(environment: Mapping[str, str] = os.environ) -> dict[int, End]:
    """Returns the ends that `environment` tells, by process id. Text that is not understood is left out."""
    ends = {}
    for text in filter(None, environment.get(ENDS_VARIABLE, "").split(",")):
        try:
            pid, status, out_of_memory = map(int, text.split(":"))
        except ValueError:
            continue
        ends[pid] = End(pid, status, bool(out_of_memory))
    return ends


class OutOfMemoryCount:
    """Counts how often the kernel has killed a process of this process's control group for want of memory, or of this
    machine where no count of the group is found. The count alone tells whether the kernel has sent a SIGKILL."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._path = _counter(root)
        self._seen = self._read()

    def has_risen(self) -> bool:
        """Returns whether the count has risen since the last call that returned True, or since the start."""
        count = self._read()
        risen, self._seen = count > self._seen, max(count, self._seen)
        return risen

    def _read(self) -> int:
        try:
            lines = self._path.read_text(encoding="ascii").splitlines()
        except (OSError, ValueError):
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _counter(root: Path) -> Path:
    """Returns the file with the line `oom_kill`: that of the control group, version 2 or 1, or that of the machine."""
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        groups = []
    for number, controllers, path in (group.split(":", 2) for group in groups if group.count(":") >= 2):
        inside = path.lstrip("/")
        if number == "0" and not controllers:
            candidates = [root / "sys/fs/cgroup" / inside / "memory.events", root / "sys/fs/cgroup/memory.events"]
        elif "memory" in controllers.split(","):
            memory = root / "sys/fs/cgroup/memory"
            candidates = [memory / inside / "memory.oom_control", memory / "memory.oom_control"]
        else:
            continue
        if found := next((candidate for candidate in candidates if candidate.is_file()), None):
            return found
    return root / "proc/vmstat"
