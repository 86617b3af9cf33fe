"""Measures the memory and handles that real processes hold, and whether these grow."""

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from octavo.testbed.stack import Stack

# Of Student's t, for many samples: a bound that the slope exceeds one time in twenty.
_T_95: Final = 1.645


def memory_mib(stack: Stack) -> dict[str, float]:
    """Returns the memory of each process's own, resident or swapped out, in MiB. Plain RSS would hide a leak that is
    swapped out."""
    return {name: _own_kib(pid) / 1024 for name, pid in _pids(stack).items()}


def handles(stack: Stack) -> dict[str, int]:
    """Counts the open files, sockets and threads of each process."""
    return {
        name: len(os.listdir(f"/proc/{pid}/fd")) + len(os.listdir(f"/proc/{pid}/task"))
        for name, pid in _pids(stack).items()
    }


def steepest_slope(times_s: Sequence[float], values: Sequence[float]) -> float:
    """Returns the upper 95 % bound of the slope of a line through the values, per hour. Needs three of them, at
    different times."""
    slope, intercept = statistics.linear_regression(times_s, values)
    rest = sum((value - slope * time - intercept) ** 2 for time, value in zip(times_s, values, strict=True))
    mean = statistics.fmean(times_s)
    spread = sum((time - mean) ** 2 for time in times_s)
    error: float = (rest / (len(values) - 2) / spread) ** 0.5
    return 3600 * (slope + _T_95 * error)


def _pids(stack: Stack) -> dict[str, int]:
    return {name: process.pid for name, process in stack.processes.items() if process.poll() is None}


def _own_kib(pid: int) -> int:
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(line[1]) for line in lines if line[0] in ("RssAnon:", "VmSwap:"))
