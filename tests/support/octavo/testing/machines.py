"""`python -m octavo.testing.machines`: the tests of whatever computes, as other people's machines compute.

What numpy's BLAS, torch, oneDNN and Octavo's own kernels do depends on the CPU. Each has a variable that names another
CPU's way, as far as this one can go it. Prints a table, and exits 1 if a test fails under one of them. ARGUMENTS are
pytest's, instead of the usual folders.
"""

import argparse
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SUITES = (
    "tests/kernels",
    "tests/worker",
    "tests/engine",
    # Compiles for a GPU, whatever the CPU.
    "--ignore=tests/kernels/triton/test_ahead.py",
)
_REPORTS = Path("build/machines")
_AVX2, _AVX512 = ("avx2", "fma"), ("avx512f", "avx512bw", "avx512vl", "avx512dq")


@dataclass(frozen=True)
class Setting:
    """A `variable` with a `value` that makes a library compute as on another CPU; `needs`: flags of this one."""

    variable: str = ""
    value: str = ""
    needs: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.variable}={self.value}" if self.variable else "as it is"


SETTINGS = (
    Setting(),
    Setting("OPENBLAS_CORETYPE", "Haswell", _AVX2),
    Setting("OPENBLAS_CORETYPE", "Zen", _AVX2),
    Setting("OPENBLAS_CORETYPE", "SkylakeX", _AVX512),
    Setting("ATEN_CPU_CAPABILITY", "avx2", _AVX2),
    Setting("ATEN_CPU_CAPABILITY", "default"),
    Setting("ONEDNN_MAX_CPU_ISA", "AVX2", _AVX2),
    # Elsewhere the best there is.
    Setting("OCTAVO_CPU_KERNELS", "avx512_bf16", ("amx_bf16",)),
    Setting("OCTAVO_CPU_KERNELS", "avx512", _AVX512),
    Setting("OCTAVO_CPU_KERNELS", "avx2", _AVX2),
    Setting("OCTAVO_CPU_KERNELS", "portable"),
)


@dataclass(frozen=True)
class Outcome:
    """Counts how many tests `passed` and names those that `failed`, in how many `seconds`; or says why nothing can be
    said, in `trouble`; or why it was `skipped`."""

    setting: Setting
    passed: int = 0
    failed: tuple[str, ...] = ()
    seconds: float = 0.0
    trouble: str = ""
    skipped: str = ""

    @property
    def good(self) -> bool:
        return not (self.failed or self.trouble)

    def lines(self) -> Iterator[str]:
        if self.skipped:
            yield f"{self.setting!s:28} skipped: {self.skipped}"
            return
        yield f"{self.setting!s:28} {self.passed:7} {len(self.failed):7} {self.seconds:7.0f}  {self.trouble}".rstrip()
        yield from (f"    {name}" for name in self.failed)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make test-machines", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME=VALUE", help="these settings")
    parser.add_argument("suites", nargs="*", metavar="ARGUMENTS", default=SUITES)
    options = parser.parse_args(arguments)
    settings = [each for each in SETTINGS if not options.only or str(each) in options.only]
    if len(settings) < len(options.only or ()):
        parser.error(f"the settings are {', '.join(map(str, SETTINGS))}")
    print(f"{'':28} {'passed':>7} {'failed':>7} {'seconds':>7}", flush=True)
    good = True
    for outcome in outcomes(settings, options.suites, cpu_flags()):
        print("\n".join(outcome.lines()), flush=True)
        good &= outcome.good
    return 0 if good else 1


def outcomes(settings: Iterable[Setting], suites: Sequence[str], flags: frozenset[str]) -> Iterator[Outcome]:
    """Yields the outcomes of the settings in their order, on a CPU with these `flags`."""
    for setting in settings:
        if missing := sorted(set(setting.needs) - flags):
            yield Outcome(setting, skipped=f"this CPU has no {', '.join(missing)}")
        else:
            yield run(setting, suites)


def run(setting: Setting, suites: Sequence[str]) -> Outcome:
    """pytest of `suites` in a process of its own: libraries read their variables once."""
    _REPORTS.mkdir(parents=True, exist_ok=True)
    report = _REPORTS / f"{setting!s}.xml".replace(" ", "-")
    report.unlink(missing_ok=True)
    ours = {each.variable for each in SETTINGS}
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment |= {"OMP_NUM_THREADS": "1"} | ({setting.variable: setting.value} if setting.variable else {})
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *suites]
    began = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    seconds = time.monotonic() - began
    if not report.exists():
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()
        return Outcome(setting, seconds=seconds, trouble=f"pytest ended with {done.returncode}: {said[-1]}")
    passed, failed = _read(report)
    # What is printed tells more than a table.
    report.with_suffix(".txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    unlisted = done.returncode != 0 and not failed
    return Outcome(setting, passed, failed, seconds, f"pytest ended with {done.returncode}" if unlisted else "")


def _read(report: Path) -> tuple[int, tuple[str, ...]]:
    """Reads how many tests passed, and which failed."""
    passed, failed = 0, []
    for case in ET.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        passed += not kinds & {"failure", "error", "skipped"}
    return passed, tuple(failed)


def cpu_flags() -> frozenset[str]:
    """Returns the CPU's flags as Linux lists them; nothing on a CPU for which Linux lists none."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    line = next((line for line in text.splitlines() if line.startswith("flags")), ":")
    return frozenset(line.split(":", 1)[1].split())


if __name__ == "__main__":
    sys.exit(main())
