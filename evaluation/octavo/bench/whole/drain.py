"""Measures a drain beside another worker: `python -m octavo.bench.whole.drain [--drains N] [--streams N]`.

Real processes and the bundled model: streams run on two workers, and one of them is drained at once, again and again,
each time with new streams. Printed are how long the streams that moved were silent, and how many tokens the other
worker computed again; with `none` no worker reads another one's blocks, so that all is computed again.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Final

import grpc
from google.protobuf.duration_pb2 import Duration

from octavo.bench.table import keep
from octavo.bench.whole.failover import Case, Round, TimeSpread, streaming, until_workers
from octavo.testbed.stack import Stack
from octavo.v1 import admin_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services
from octavo.worker.loading.prepare import prepare_bundled_model

WORKERS: Final = ("worker-0", "worker-1")
CASES: Final = {"moves": {}, "none": {"OCTAVO_PEER_ENDPOINT": "none"}}
# One thread each, as in `octavo.bench.whole.failover`.
MODEL: Final = {
    "OCTAVO_DEVICE": "cpu",
    "OCTAVO_THREADS": "1",
    # What guesses are wrong would count as computed again.
    "OCTAVO_SPECULATION": "off",
    "OCTAVO_NUM_BLOCKS": "4096",
    "OCTAVO_NUM_CPU_BLOCKS": "2048",
}


@dataclass(frozen=True)
class DrainRow:
    """Holds the figures of one case: the longest silences of the streams that moved, in milliseconds; those of the
    others at the same time; the tokens that were computed again, and the seconds until the worker was let go."""

    case: str
    drains: int
    streams_moved: int
    gap: TimeSpread
    undisturbed: TimeSpread
    tokens_again: int
    drain_s: float

    def to_text(self) -> str:
        lines = [
            f"{self.case}: {self.drains} drains, {self.streams_moved} streams moved, {self.tokens_again} tokens"
            f" computed again, {self.drain_s:.2f} s until the worker was let go; ms, p50 / p99 / longest"
        ]
        for name in ("gap", "undisturbed"):
            spread: TimeSpread = getattr(self, name)
            lines.append(f"  {name:<12} {spread.p50:.0f} / {spread.p99:.0f} / {spread.longest:.0f}")
        return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table, and writes JSON where asked."""
    parser = argparse.ArgumentParser(prog="octavo.bench.whole.drain", description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--drains", type=int, default=5)
    parser.add_argument("--streams", type=int, default=64, help="of both workers together")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows = []
    for case in options.cases:
        rows.append(measure(case, options.drains, options.streams, options.prompt_tokens, options.seed))
        print(rows[-1].to_text(), flush=True)
    keep(rows, options.json)
    return 0


def measure(name: str, drains: int, streams: int, prompt_tokens: int, seed: int) -> DrainRow:
    """Runs one case on processes of its own."""
    case = Case({**MODEL, **CASES[name]}, is_real=True, streams=streams, prompt_tokens=prompt_tokens)
    with (
        tempfile.TemporaryDirectory(prefix="octavo-") as parent,
        Stack(prepare_bundled_model(), Path(parent) / "run", case.environment) as stack,
    ):
        found = asyncio.run(_drains(stack, drains, case, Random(seed)))
    gaps = [gap for each in found for gap in each.moved]
    return DrainRow(
        case=name,
        drains=drains,
        streams_moved=len(gaps),
        gap=TimeSpread.of(gaps),
        undisturbed=TimeSpread.of([gap for each in found for gap in each.stayed]),
        tokens_again=sum(each.tokens_again for each in found),
        drain_s=max(each.seconds for each in found),
    )


@dataclass(frozen=True)
class _Drain:
    """Holds one drain: the longest silences of the streams that moved and of those that stayed, the tokens that were
    computed again, and how long it took."""

    moved: list[float]
    stayed: list[float]
    tokens_again: int
    seconds: float


async def _drains(stack: Stack, drains: int, case: Case, random: Random) -> list[_Drain]:
    for name in ("scheduler", "frontend", *WORKERS):
        stack.start_named(name)
    await asyncio.to_thread(stack.wait_ready)
    found = []
    async with grpc.aio.insecure_channel(stack.address) as channel:
        stub: Any = services.GenerationServiceStub(channel)
        for number in range(drains):
            await until_workers(stack, len(WORKERS))
            streams = Round()
            async with streaming(stub, streams, number, case, random):
                found.append(await _drain(stack, streams, random))
            await asyncio.to_thread(stack.wait_idle)
    return found


async def _drain(stack: Stack, streams: Round, random: Random) -> _Drain:
    """Drains one worker, and starts it again when the other has all streams."""
    victim = random.choice(WORKERS)
    await asyncio.sleep(random.uniform(0.5, 1.0))
    homes = {each.request_id: each.worker_id for each in stack.admin.ListRequests(pb.ListRequestsRequest()).requests}
    before = _again(stack, victim)
    streams.killed_at = time.monotonic()
    stack.admin.DrainWorker(pb.DrainWorkerRequest(worker_id=victim, grace=Duration()))
    await until_workers(stack, len(WORKERS) - 1)
    seconds = time.monotonic() - streams.killed_at
    await asyncio.to_thread(stack.wait_for, lambda: stack.load().running == len(streams.token_at), 60.0)
    await asyncio.sleep(1.0)
    again = _again(stack, victim) - before
    gaps = {request_id: _gap(streams, request_id) for request_id in streams.token_at}
    stack.processes[victim].wait()
    stack.start_named(victim)
    moved = [gap for request_id, gap in gaps.items() if homes.get(request_id) == victim]
    stayed = [gap for request_id, gap in gaps.items() if homes.get(request_id) != victim]
    return _Drain(moved, stayed, again, seconds)


def _again(stack: Stack, victim: str) -> int:
    """Returns the tokens that the other worker has computed beside one for each that it sampled."""
    (other,) = (worker for worker in stack.load().workers if worker.id != victim)
    return int(other.tokens_computed - other.tokens_sampled)


def _gap(streams: Round, request_id: str) -> float:
    """Returns the longest silence that ended after the drain began, in seconds."""
    times = streams.token_at[request_id]
    return max(after - before for before, after in pairwise(times) if after > streams.killed_at)


if __name__ == "__main__":
    sys.exit(main())
