"""How many CPU cores this process may use: what it is pinned to, less where a cgroup says so."""

import math
import os
from pathlib import Path

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
