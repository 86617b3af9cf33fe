"""Counts what one run of a case takes: time, tokens, CPU time and memory. Only the standard library is used here."""

import os
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from octavo.bench.workloads import Case

# The CPU time that went to neither the processes measured nor their client.
OTHERS = "others"


@dataclass
class TokenTimes:
    """Holds the times of a request's first and last token, in seconds since the case began."""

    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0

    def arrived(self, num_tokens: int, at: float) -> None:
        if num_tokens and not self.num_tokens:
            self.first = at
        self.num_tokens += num_tokens
        self.last = at


@dataclass(frozen=True)
class Measurement:
    """Holds one run of a case. Times in seconds unless named otherwise; `stages` are shares of the wall time, `cpu_s`
    is by process. `ms_per_token` is the median over the requests of the time between two tokens of one, None where none
    has two that come apart."""

    case: str
    wall_s: float
    output_tokens_per_s: float
    ms_per_token: float | None
    ttft_ms: float
    ttft_ms_worst: float
    steps: int
    stages: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)

    @property
    def others_share(self) -> float:
        """Returns the share of all cores' time that other processes took."""
        return self.cpu_s.get(OTHERS, 0.0) / (self.wall_s * (os.cpu_count() or 1))

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return cls(**value)


def measured(
    case: Case,
    wall_s: float,
    streams: list[TokenTimes],
    steps: int,
    stage_s: dict[str, float] | None = None,
    cpu_s: dict[str, float] | None = None,
) -> Measurement:
    """Sums up a run. Raises `RuntimeError` if a request got another number of tokens than it asked for."""
    for job, stream in zip(case.jobs, streams, strict=True):
        if stream.num_tokens != job.num_output_tokens:
            raise RuntimeError(
                f"case {case.name}: {stream.num_tokens} tokens came where {job.num_output_tokens} were asked for"
            )
    return Measurement(
        case=case.name,
        wall_s=wall_s,
        output_tokens_per_s=case.num_output_tokens / wall_s,
        ms_per_token=_ms_per_token(case, streams),
        ttft_ms=1000 * statistics.median(stream.first for stream in streams),
        ttft_ms_worst=1000 * max(stream.first for stream in streams),
        steps=steps,
        stages=_shares(stage_s, wall_s) if stage_s else {},
        cpu_s=cpu_s or {},
    )


def _ms_per_token(case: Case, streams: list[TokenTimes]) -> float | None:
    gaps = [
        (stream.last - stream.first) / (job.num_tokens - 1)
        for job, stream in zip(case.jobs, streams, strict=True)
        if job.num_tokens > 1 and stream.last > stream.first
    ]
    return 1000 * statistics.median(gaps) if gaps else None


def _shares(stage_s: dict[str, float], wall_s: float) -> dict[str, float]:
    """Returns the share of each stage, and the share that no stage accounts for as `other`."""
    shares = {name: seconds / wall_s for name, seconds in stage_s.items()}
    return {**shares, "other": 1.0 - sum(shares.values())}


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CpuMeter:
    """Measures the wall time since it was made, and the CPU time of processes, by name, and of all others in it."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._cpu_before = self._cpu_s()
        self._began = time.perf_counter()

    def wall_s(self) -> float:
        return time.perf_counter() - self._began

    def cpu_s(self) -> dict[str, float]:
        # Never less than nothing: the machine's count may be some ticks behind those of its processes.
        return {name: max(0.0, seconds - self._cpu_before[name]) for name, seconds in self._cpu_s().items()}

    def _cpu_s(self) -> dict[str, float]:
        ours = {name: process_cpu_s(pid) for name, pid in self._pids.items()}
        return {**ours, OTHERS: machine_cpu_s() - sum(ours.values())}


def process_cpu_s(pid: int) -> float:
    """Returns the CPU seconds of a process, user and system, of all its threads."""
    return _cpu_s(Path(f"/proc/{pid}/stat"))


def thread_cpu_s(pid: int) -> float:
    """Returns the CPU seconds of the process's first thread alone, user and system."""
    return _cpu_s(Path(f"/proc/{pid}/task/{pid}/stat"))


def _cpu_s(stat: Path) -> float:
    # Fields 14 and 15 of proc(5)'s stat, counted after the parenthesised name.
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def wake_ups(pid: int) -> int:
    """Returns how often the threads of a process have slept of themselves, each time to be woken."""
    return sum(_voluntary_switches(status) for status in Path(f"/proc/{pid}/task").glob("*/status"))


def _voluntary_switches(status: Path) -> int:
    for line in status.read_text().splitlines():
        if line.startswith("voluntary_ctxt_switches:"):
            return int(line.split()[1])
    raise RuntimeError(f"{status} names no voluntary_ctxt_switches")


def machine_cpu_s() -> float:
    """Returns the CPU seconds of all processes and of the kernel itself."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S


def children(pid: int) -> list[int]:
    """Returns the ids of the processes that a process has started, and that still run."""
    return [int(one) for each in Path(f"/proc/{pid}/task").glob("*/children") for one in each.read_text().split()]


def peak_memory(pid: int) -> int:
    """Returns the most bytes that a process has had resident."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/{pid}/status names no VmHWM")
