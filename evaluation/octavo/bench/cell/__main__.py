"""Measures how many replicas one scheduler keeps busy on one core: `python -m octavo.bench.cell [--replicas N ...]
[--grow]`.

The scheduler is the real process, as its users run it, held to one core. Its replicas compute nothing and take 20 ms
for it, 5 % more or less; frontends have as many requests under way as can run, each of 256 prompt and 128 to 384
output tokens. All of these are one thread of this process, on another core. A replica is busy while it has a plan
under way. CPU time is user and system, of all threads, as the kernel counts it.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Final

from octavo.bench.cell.load import Played, PlayedCell, Size, busy_shares
from octavo.bench.measurement import OTHERS, CpuMeter, thread_cpu_s
from octavo.bench.table import keep
from octavo.runtime.process.gc_tuning import collect_seldom
from octavo.testbed.stack import Stack

GOAL: Final = 0.95
# A real frontend hands on the tokens of about two such replicas on a core of its own.
_REPLICAS_PER_FRONTEND: Final = 2
_GROWTH: Final = 1.25


@dataclass(frozen=True)
class CellRow:
    """Holds the figures of one size of a cell. Shares are of the wall time, CPU of one core; sizes are means in
    bytes."""

    replicas: int
    sequences: int
    frontends: int
    busy: float
    busy_least: float
    steps_per_s: float
    steps_wanted_per_s: float
    tokens_per_s: float
    requests_per_s: float
    scheduler: float
    scheduler_loop: float
    us_per_step: float
    load: float
    others: float
    late: float
    latest_ms: float
    plan_bytes: float
    result_bytes: float
    deltas_bytes: float
    deltas_per_step: float

    def to_text(self) -> str:
        # On a busy machine a short measurement may take less of the CPU than the kernel counts.
        room = (
            f"a core is used up by {self.replicas / self.scheduler:.0f} replicas" if self.scheduler else "too few ticks"
        )
        return "\n".join(
            (
                f"{self.replicas} replicas x {self.sequences} sequences, {self.frontends} frontends:"
                f" busy {self.busy:.1%}, the least busy {self.busy_least:.1%} (goal {GOAL:.0%})",
                f"  {self.steps_per_s:.0f} steps/s of {self.steps_wanted_per_s:.0f}, {self.tokens_per_s:.0f} tokens/s,"
                f" {self.requests_per_s:.0f} requests/s",
                f"  scheduler {self.scheduler:.1%} of a core ({self.scheduler_loop:.1%} its loop),"
                f" {self.us_per_step:.0f} us per step: {room}",
                f"  the load itself {self.load:.1%}, all others {self.others:.1%} of a core;"
                f" it looked late by {self.late:.2%} of the time, {self.latest_ms:.1f} ms at most",
                f"  bytes: plan {self.plan_bytes:.0f}, result {self.result_bytes:.0f}, deltas {self.deltas_bytes:.0f}"
                f" ({self.deltas_per_step:.1f} messages per step)",
            )
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table, and writes JSON where asked."""
    options = _options(arguments)
    collect_seldom()
    rows = list(_printed(_grown(options) if options.grow else _measured(options, options.replicas)))
    keep(rows, options.json)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="octavo.bench.cell", description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[16], help="sizes to measure")
    parser.add_argument(
        "--grow", action="store_true", help="grow from the first size until replicas are no longer busy"
    )
    parser.add_argument("--sequences", type=int, default=64, help="running on each replica")
    parser.add_argument("--frontends", type=int, help="one for every two replicas, if not given")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=10.0, help="measured, of each size")
    parser.add_argument("--warm-up", type=float, default=6.0, help="seconds before, until requests end as they come")
    parser.add_argument("--pin", action=argparse.BooleanOptionalAction, default=True, help="hold processes to cores")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def _printed(rows: Iterator[CellRow]) -> Iterator[CellRow]:
    for row in rows:
        print(row.to_text(), flush=True)
        yield row


def _measured(options: argparse.Namespace, sizes: Sequence[int]) -> Iterator[CellRow]:
    for replicas in sizes:
        yield measure(_size(options, replicas), options.warm_up, options.seconds, pin=options.pin)


def _grown(options: argparse.Namespace) -> Iterator[CellRow]:
    """Measures ever larger cells, up to the first that is not kept busy."""
    replicas, is_busy = options.replicas[0], True
    while is_busy:
        for row in _measured(options, [replicas]):
            yield row
            is_busy = row.busy_least >= GOAL
        replicas = ceil(replicas * _GROWTH)


def _size(options: argparse.Namespace, replicas: int) -> Size:
    frontends = options.frontends or ceil(replicas / _REPLICAS_PER_FRONTEND)
    return Size(replicas, options.sequences, frontends, options.step_ms / 1000)


def measure(size: Size, warm_up_s: float, seconds: float, *, pin: bool) -> CellRow:
    """Starts a scheduler, loads it, and stops it."""
    with tempfile.TemporaryDirectory(prefix="octavo-") as name, Stack(Path(name), Path(name) / "run") as stack:
        scheduler = _start(stack, size, pin=pin)
        endpoints = (f"ipc://{stack.directory}/{peers}.sock" for peers in ("frontends", "workers"))
        with PlayedCell(size, *endpoints) as load:
            load.begin()
            load.play(warm_up_s)
            meter, loop_s = CpuMeter({"scheduler": scheduler, "load": os.getpid()}), thread_cpu_s(scheduler)
            played = load.play(seconds)
            return _row(size, played, meter.cpu_s(), thread_cpu_s(scheduler) - loop_s)


def _start(stack: Stack, size: Size, *, pin: bool) -> int:
    """Starts the scheduler and returns its process id. With `pin`, the scheduler gets the first core of this process,
    which keeps the others."""
    cores = sorted(os.sched_getaffinity(0))
    settings = {"OCTAVO_MAX_NUM_SEQS": str(size.sequences), "OCTAVO_MAX_WAITING": str(1 << 16)}
    if not pin:
        return stack.start("scheduler", **settings).pid
    try:
        os.sched_setaffinity(0, cores[:1])
        return stack.start("scheduler", **settings).pid
    finally:
        os.sched_setaffinity(0, cores[1:] or cores)


def _row(size: Size, played: Played, cpu_s: dict[str, float], loop_s: float) -> CellRow:
    wall_s, tallies = played.wall_s, played.tallies
    if not (steps := sum(tally.steps for tally in tallies)):
        raise RuntimeError("no step was made while it was measured: the machine is too busy")
    busy = busy_shares(tallies, wall_s)
    return CellRow(
        replicas=size.replicas,
        sequences=size.sequences,
        frontends=size.frontends,
        busy=fmean(busy),
        busy_least=min(busy),
        steps_per_s=steps / wall_s,
        steps_wanted_per_s=size.replicas / size.step_s,
        tokens_per_s=sum(tally.tokens for tally in tallies) / wall_s,
        requests_per_s=played.ended / wall_s,
        scheduler=cpu_s["scheduler"] / wall_s,
        scheduler_loop=loop_s / wall_s,
        us_per_step=cpu_s["scheduler"] / steps * 1e6,
        load=cpu_s["load"] / wall_s,
        others=cpu_s[OTHERS] / wall_s,
        late=fmean(tally.late_s for tally in tallies) / wall_s,
        latest_ms=1000 * max(tally.latest_s for tally in tallies),
        plan_bytes=sum(tally.plan_bytes for tally in tallies) / steps,
        result_bytes=sum(tally.result_bytes for tally in tallies) / steps,
        deltas_bytes=played.message_bytes / max(1, played.messages),
        deltas_per_step=played.messages / steps,
    )


if __name__ == "__main__":
    sys.exit(main())
