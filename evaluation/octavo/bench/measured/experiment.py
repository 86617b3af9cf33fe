"""Holds an experiment's settings, its machine, and its findings: rows of named values, as a table and as JSON."""

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from octavo.bench.table import keep, table
from octavo.kernels.native.library import NativeUnavailable, find
from octavo.worker.model_settings import ModelSettings
from octavo.worker.step.model_runner import ModelRunner


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
    """Returns the CPU's name as Linux names it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


DEFAULT_BLOCK_SIZE = 16
_BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_QUICK_BLOCK_SIZES = (8, 16, 32)


@dataclass(frozen=True)
class Options:
    """`quick`: so little that it shows that everything runs, and measures nothing."""

    model: Path
    dtype: str
    threads: int
    quick: bool

    @property
    def block_sizes(self) -> tuple[int, ...]:
        return _QUICK_BLOCK_SIZES if self.quick else _BLOCK_SIZES

    @property
    def model_name(self) -> str:
        return self.model.name

    @property
    def machine(self) -> Machine:
        return Machine.here(self.threads)

    def rounds(self, usual: int) -> int:
        return 1 if self.quick else usual

    def runner(self, block_size: int, slots: int, cpu_slots: int = 0) -> ModelRunner:
        """Loads the model with a pool of `slots` tokens, in blocks."""
        return ModelRunner(
            self.model,
            ModelSettings(
                dtype=self.dtype,
                threads=self.threads,
                block_size=block_size,
                num_blocks=slots // block_size,
                num_cpu_blocks=cpu_slots // block_size,
            ),
        )


Value = str | int | float | None


@dataclass(frozen=True)
class Findings:
    """`name` becomes part of the file's name. All rows have the same keys, whose ends tell their units: `_ms`, `_us`,
    `_s`, `_per_s`, `_x` (a ratio), `_share`. `settings` say what was asked for, `notes` what to know of it."""

    name: str
    title: str
    machine: Machine
    settings: dict[str, Value]
    notes: list[str]
    rows: list[dict[str, Value]]

    def write(self, directory: Path) -> None:
        """Writes the figure into `measured_NAME.json` in `directory`."""
        directory.mkdir(parents=True, exist_ok=True)
        keep(self, directory / f"measured_{self.name}.json")

    def to_text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield self.title
        yield ", ".join(f"{name} {_cell(value)}" for name, value in self.settings.items())
        heads = list(self.rows[0])
        yield from table([heads, *([_cell(row[name]) for name in heads] for row in self.rows)])
        yield from self.notes


def _cell(value: Value) -> str:
    match value:
        case None:
            return "-"
        case float():
            return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
        case _:
            return str(value)
