"""What the kernel counts of processes: CPU time and memory. Only the standard library is used here."""

import os
import time
from pathlib import Path

from octavo.bench.measurement import OTHERS

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Meter:
    """The wall time since it was made, and the CPU time of processes, by name, and of all others in it. Seconds."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._cpu_before = self._cpu_s()
        self._began = time.perf_counter()

    def wall_s(self) -> float:
        return time.perf_counter() - self._began

    def cpu_s(self) -> dict[str, float]:
        return {name: seconds - self._cpu_before[name] for name, seconds in self._cpu_s().items()}

    def _cpu_s(self) -> dict[str, float]:
        ours = {name: process_cpu_s(pid) for name, pid in self._pids.items()}
        return {**ours, OTHERS: machine_cpu_s() - sum(ours.values())}


def process_cpu_s(pid: int) -> float:
    """User and system, of all its threads."""
    return _cpu_s(Path(f"/proc/{pid}/stat"))


def thread_cpu_s(pid: int) -> float:
    """The same, of its first thread alone."""
    return _cpu_s(Path(f"/proc/{pid}/task/{pid}/stat"))


def _cpu_s(stat: Path) -> float:
    # Fields 14 and 15 of proc(5)'s stat, counted after the parenthesised name.
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def machine_cpu_s() -> float:
    """Of all processes and the kernel itself."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S


def peak_memory(pid: int) -> int:
    """The most bytes that a process has had resident."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/{pid}/status names no VmHWM")
