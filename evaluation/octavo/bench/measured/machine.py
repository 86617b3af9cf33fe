"""The machine that was measured, by what decides about speed."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from octavo.kernels.native.library import NativeUnavailable, find


@dataclass(frozen=True)
class Machine:
    """`threads` computed; `kernels` are the instructions that Octavo's own kernels were compiled for."""

    cpu: str
    cores: int
    memory_gib: float
    threads: int
    kernels: str
    torch: str
    python: str

    @classmethod
    def here(cls, threads: int) -> Self:
        library = find()
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(
            cpu=_cpu_model(),
            cores=os.cpu_count() or 1,
            memory_gib=round(memory / (1 << 30), 1),
            threads=threads,
            kernels="none" if isinstance(library, NativeUnavailable) else library.variant,
            torch=torch.__version__,
            python=platform.python_version(),
        )


def _cpu_model() -> str:
    """As Linux names it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
