"""Measures what it costs to start: each process of Octavo until it serves, and each import.

`python -m octavo.bench.parts.start_up` starts a scheduler, a worker of the bundled model and a frontend, one after the
other, and prints for each the time until it serves, and the memory that it has then. With `--import MODULE ...` it
prints instead what each import takes in a fresh interpreter that has imported `--beside` before. Medians of rounds.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median

from grpc_health.v1.health_pb2 import HealthCheckResponse

from octavo.bench.measurement import children, process_cpu_s
from octavo.bench.table import line
from octavo.testbed.stack import Stack
from octavo.v1 import generation_pb2

_LONG_TEXT = "a long text " * 1000
_KIB, _MIB = 1 << 10, 1 << 20
_IMPORT_WIDTHS = (44, 8, 8, 9)
_PROCESS_WIDTHS = (16, 9, 8, 9, 9)
# So little that the rest of the worker shows.
_SETTINGS = {"OCTAVO_KV_CACHE_MEMORY": "64MiB", "OCTAVO_MAX_MODEL_LEN": "2048"}
_IMPORTS = """
import importlib, sys, time
def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))
for name in sys.argv[2:]:
    importlib.import_module(name)
cpu, memory, modules = time.process_time(), resident(), len(sys.modules)
importlib.import_module(sys.argv[1])
print(time.process_time() - cpu, 1024 * (resident() - memory), len(sys.modules) - modules)
"""


@dataclass(frozen=True)
class StartUp:
    """Tells what a process took until it served: seconds of the clock and of CPU, and bytes that were resident then,
    `private_bytes` of them its own."""

    wall_s: float
    cpu_s: float
    resident_bytes: float
    private_bytes: float


@dataclass(frozen=True)
class Imported:
    """Tells what an import took: seconds of CPU, bytes that became resident, and modules."""

    cpu_s: float
    resident_bytes: float
    modules: float


def start_processes(model: Path) -> dict[str, StartUp]:
    """Starts one process of each kind for `model`, and returns what each took, by its name. The frontend starts a text
    process for the first long text."""
    with (
        tempfile.TemporaryDirectory(prefix="octavo-") as parent,
        Stack(model, Path(parent) / "run", _SETTINGS) as stack,
    ):
        found = {
            "scheduler": _start(stack, "scheduler", lambda: stack.load() is not None),
            "worker": _start(stack, "worker", lambda: len(stack.load().workers) == 1),
            "frontend": _start(stack, "frontend", lambda: stack.health() == HealthCheckResponse.SERVING),
        }
        began = time.perf_counter()
        stack.generation.Tokenize(generation_pb2.TokenizeRequest(text=_LONG_TEXT), timeout=120)
        wall_s = time.perf_counter() - began
        for pid in children(stack.processes["frontend"].pid):
            found["text process"] = StartUp(wall_s, process_cpu_s(pid), *_memory(pid))
    return found


def measure_import(module: str, beside: Sequence[str]) -> Imported:
    """Imports `module` in a fresh interpreter, after the modules `beside`. Raises `CalledProcessError`."""
    command = [sys.executable, "-c", _IMPORTS, module, *beside]
    found = subprocess.run(command, capture_output=True, check=True, text=True, timeout=120)
    return Imported(*map(float, found.stdout.split()))


def _start(stack: Stack, name: str, serves: Callable[[], bool]) -> StartUp:
    began = time.perf_counter()
    process = stack.start(name)
    stack.wait_for(serves, seconds=120)
    return StartUp(time.perf_counter() - began, process_cpu_s(process.pid), *_memory(process.pid))


def _memory(pid: int) -> tuple[int, int]:
    """Returns how many bytes of a process are resident, and how many of them are its own."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    resident, private = (_KIB * int(fields[name].split()[0]) for name in ("VmRSS", "RssAnon"))
    return resident, private


def _medians(rounds: Iterable[StartUp | Imported]) -> list[float]:
    return [median(values) for values in zip(*map(astuple, rounds), strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line for each process, or for each import."""
    parser = argparse.ArgumentParser(prog="octavo.bench.parts.start_up", description=__doc__)
    parser.add_argument("--model", type=Path, help="a model directory; the bundled model's if none is given")
    parser.add_argument("--import", nargs="+", metavar="MODULE", dest="modules", default=[])
    parser.add_argument("--beside", nargs="+", metavar="MODULE", default=[], help="imported before")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args(arguments)
    if chosen.modules:
        print(line(("import", "CPU ms", "MiB", "modules"), _IMPORT_WIDTHS))
        for module in chosen.modules:
            cpu_s, resident, modules = _medians(measure_import(module, chosen.beside) for _ in range(chosen.rounds))
            cells = f"{1e3 * cpu_s:.0f}", f"{resident / _MIB:.1f}", f"{modules:.0f}"
            print(line((module, *cells), _IMPORT_WIDTHS), flush=True)
        return
    rounds = [start_processes(chosen.model or _bundled_model()) for _ in range(chosen.rounds)]
    print(line(("until it serves", "seconds", "CPU s", "RSS MiB", "own MiB"), _PROCESS_WIDTHS))
    for name in rounds[0]:
        wall_s, cpu_s, resident, private = _medians(each[name] for each in rounds)
        seconds, sizes = (f"{wall_s:.2f}", f"{cpu_s:.2f}"), (f"{resident / _MIB:.0f}", f"{private / _MIB:.0f}")
        print(line((name, *seconds, *sizes), _PROCESS_WIDTHS))


def _bundled_model() -> Path:
    from octavo.worker.loading.prepare import prepare_bundled_model

    return prepare_bundled_model()


if __name__ == "__main__":
    main()
