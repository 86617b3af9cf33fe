"""Measures the silence of streams whose worker dies: `python -m octavo.bench.whole.failover [CASES] [--kills N]`.

Real processes: two workers share 64 streams (`long`: six with prompts of 7,600 tokens), and one of them is killed (-9)
at a random moment, again and again, each time with new streams. With `mirror` and `long-mirror` they keep what they
compute on a disk, where the other finds it. The clients know how long each stream was silent; the
scheduler's event log says, by the same clock, where that time went:

* detect: until the scheduler knew that the worker is gone
* queue: until a plan had the stream's first recomputed tokens, behind those of others
* recompute: until its next token was there
* deliver: until its client had it

The goal is a gap of 500 ms beside the recomputing, in 99 of 100 streams.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Final

import grpc

from octavo.bench.table import keep
from octavo.scheduler.core.events import Effect, ReplicaLost, SendToFrontend, SendToReplica
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.server.event_log import Began, EventLogError, Handled, Record, Scheduled, read_records
from octavo.testbed.stack import Stack, token_request
from octavo.testbed.tiny_model import write_byte_model
from octavo.v1 import generation_pb2_grpc as services
from octavo.wire.requests import Deltas
from octavo.wire.steps import StepPlan
from octavo.worker.loading.prepare import prepare_bundled_model


@dataclass
class Moved:
    """Holds the time when a request was in a plan again, and the time of its next token; 0 before."""

    planned_at: float = 0.0
    answered_at: float = 0.0


@dataclass(frozen=True)
class Loss:
    """Holds a replica that was lost at a time, and the requests that ran there."""

    at: float
    moved: dict[str, Moved] = field(default_factory=dict)


def read_losses(records: Iterable[Record]) -> Iterator[Loss]:
    """Feeds a log to a fresh core; gives each loss once all is over. Raises `EventLogError` if it is none."""
    began, *others = records
    if not isinstance(began, Began):
        raise EventLogError("the log does not begin with what made its core")
    reader = _Reader(Scheduler(began.config, began.epoch))
    for record in others:
        reader.take(record)
    yield from reader.losses


class _Reader:
    def __init__(self, core: Scheduler) -> None:
        self.losses: list[Loss] = []
        self._core = core
        # Where requests run, by replica, as it was after the last plan.
        self._running: dict[int, list[str]] = {}

    def take(self, record: Record) -> None:
        match record:
            case Handled(now, event):
                self._follow(self._core.handle(event, now), now)
            case Scheduled(now):
                self._follow(self._core.schedule(now), now)

    def _follow(self, effects: list[Effect], now: float) -> None:
        for effect in effects:
            match effect:
                case ReplicaLost(replica_id):
                    moved = {request_id: Moved() for request_id in self._running.get(replica_id, [])}
                    self.losses.append(Loss(now, moved))
                case SendToReplica(replica_id, StepPlan() as plan):
                    self._planned(replica_id, plan, now)
                case SendToFrontend(_, Deltas(_, deltas)):
                    for delta in deltas:
                        self._answered(delta.request_id, now)

    def _planned(self, replica_id: int, plan: StepPlan, now: float) -> None:
        groups = self._core.replicas[replica_id].running
        self._running[replica_id] = [group.request_id for group in groups]
        begun = {start.sequence_id for start in plan.starts}
        for group in groups:
            if begun.intersection(sequence.placement.sequence_id for sequence in group.live):
                for loss in self.losses:
                    if (moved := loss.moved.get(group.request_id)) and not moved.planned_at:
                        moved.planned_at = now

    def _answered(self, request_id: str, now: float) -> None:
        for loss in self.losses:
            if (moved := loss.moved.get(request_id)) and not moved.answered_at:
                moved.answered_at = now


_WORKERS: Final = ("worker-0", "worker-1")
_GOAL_S: Final = 0.5
# All ids are below those of either model's vocabulary.
_NUM_IDS: Final = 250
_BLOCKS: Final = {"OCTAVO_NUM_BLOCKS": "2048"}
# One thread: a team of two collapses wherever another process wants a core for a moment.
_MODEL: Final = {"OCTAVO_DEVICE": "cpu", "OCTAVO_THREADS": "1"}


@dataclass(frozen=True)
class Case:
    """Describes the workers and the requests of the streams. `max_tokens` is more than a stream gets before it is
    cancelled."""

    environment: dict[str, str]
    is_real: bool = False
    streams: int = 64
    prompt_tokens: int = 64
    max_tokens: int = 1900
    # The workers have a disk, on which what they compute is mirrored.
    mirrors: bool = False


_CASES: Final = {
    "fake": Case({"OCTAVO_DEVICE": "fake", "OCTAVO_FAKE_STEP_MS": "20", **_BLOCKS}),
    "model": Case({**_MODEL, **_BLOCKS}, is_real=True),
    "mirror": Case({**_MODEL, **_BLOCKS, "OCTAVO_NUM_CPU_BLOCKS": "2048"}, is_real=True, mirrors=True),
    "long": Case({**_MODEL, "OCTAVO_NUM_BLOCKS": "3200"}, is_real=True, streams=6, prompt_tokens=7600, max_tokens=500),
    "long-mirror": Case(
        {**_MODEL, "OCTAVO_NUM_BLOCKS": "3200", "OCTAVO_NUM_CPU_BLOCKS": "6400"},
        is_real=True,
        streams=6,
        prompt_tokens=7600,
        max_tokens=500,
        mirrors=True,
    ),
}


@dataclass(frozen=True)
class TimeSpread:
    """Summarizes one kind of time, in milliseconds."""

    p50: float
    p99: float
    longest: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "TimeSpread":
        ordered = sorted(seconds)
        return cls(*(1000 * ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 99, 100)))


@dataclass(frozen=True)
class FailoverRow:
    """Holds the figures of one case. `beside` is the gap without the stream's own recomputing, for which the goal
    stands; `unspent` is `beside` without the queue too, which others' recomputing makes; `undisturbed` is the longest
    gap at the same time of a stream of the other worker."""

    case: str
    kills: int
    streams_moved: int
    gap: TimeSpread
    beside: TimeSpread
    unspent: TimeSpread
    undisturbed: TimeSpread
    detect: TimeSpread
    queue: TimeSpread
    recompute: TimeSpread
    deliver: TimeSpread

    def to_text(self) -> str:
        goal = f"(goal of p99 {1000 * _GOAL_S:.0f})"
        lines = [f"{self.case}: {self.kills} kills, {self.streams_moved} streams moved; ms, p50 / p99 / longest"]
        for name in ("gap", "beside", "unspent", "undisturbed", "detect", "queue", "recompute", "deliver"):
            spread: TimeSpread = getattr(self, name)
            figures = f"{spread.p50:.0f} / {spread.p99:.0f} / {spread.longest:.0f}"
            lines.append(f"  {name:<12} {figures} {goal if name == 'beside' else ''}".rstrip())
        return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table, and writes JSON where asked."""
    options = _options(arguments)
    rows = []
    for case in options.cases:
        rows.append(measure(case, options.kills, options.seed))
        print(rows[-1].to_text(), flush=True)
    keep(rows, options.json)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="octavo.bench.whole.failover", description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(_CASES), metavar="CASE", help=f"of {', '.join(_CASES)}")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def measure(name: str, kills: int, seed: int) -> FailoverRow:
    """Runs one case on processes of its own."""
    case = _CASES[name]
    with tempfile.TemporaryDirectory(prefix="octavo-") as parent:
        directory = Path(parent) / "run"
        log = Path(parent) / "events"
        kept = {"OCTAVO_KV_DISK": str(Path(parent) / "kv"), "OCTAVO_KV_MIRROR": "1"} if case.mirrors else {}
        environment = {**case.environment, "OCTAVO_EVENT_LOG": str(log), **kept}
        with Stack(_model(case, Path(parent) / "byte-model"), directory, environment) as stack:
            rounds = asyncio.run(_rounds(stack, kills, case, Random(seed)))
            # Its log is whole when it has ended.
            stack.kill("scheduler", signal.SIGTERM)
        with log.open("rb") as file:
            return _row(name, rounds, list(read_losses(read_records(file))))


def _model(case: Case, directory: Path) -> Path:
    if case.is_real:
        return prepare_bundled_model()
    write_byte_model(directory)
    return directory


@dataclass
class Round:
    """Holds one kill, and the times of each stream's tokens, by request id."""

    killed_at: float = 0.0
    token_at: dict[str, list[float]] = field(default_factory=dict)

    def gap(self, request_id: str) -> float:
        """Returns the longest silence that ended after the kill, in seconds."""
        times = self.token_at[request_id]
        return max(after - before for before, after in pairwise(times) if after > self.killed_at)

    def delivered_at(self, request_id: str, sent_at: float) -> float:
        """Returns the time when the first token came that was sent at `sent_at` or later."""
        return next(at for at in self.token_at[request_id] if at >= sent_at)


async def _rounds(stack: Stack, kills: int, case: Case, random: Random) -> list[Round]:
    for name in ("scheduler", "frontend", *_WORKERS):
        stack.start_named(name)
    await asyncio.to_thread(stack.wait_ready)
    rounds = []
    async with grpc.aio.insecure_channel(stack.address) as channel:
        stub: Any = services.GenerationServiceStub(channel)
        for number in range(kills):
            await until_workers(stack, len(_WORKERS))
            found = Round()
            async with streaming(stub, found, number, case, random):
                await _kill(stack, found, random)
            rounds.append(found)
            await asyncio.to_thread(stack.wait_idle)
    return rounds


async def until_workers(stack: Stack, count: int) -> None:
    await asyncio.to_thread(stack.wait_for, lambda: len(stack.load().workers) == count, 60.0)


@contextlib.asynccontextmanager
async def streaming(stub: Any, found: Round, number: int, case: Case, random: Random) -> AsyncIterator[None]:
    """Reads `case.streams` streams, which all have begun at the beginning of the block, and which the block's end
    cancels."""
    found.token_at = {f"{number}-{stream}": [] for stream in range(case.streams)}
    reading = [asyncio.create_task(_read(stub, request_id, found, case, random)) for request_id in found.token_at]
    try:
        await _until_each_has(found, 1, reading)
        yield
        await _until_each_has(found, 5, reading, after=time.monotonic())
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


async def _read(stub: Any, request_id: str, found: Round, case: Case, random: Random) -> None:
    prompt = random.choices(range(_NUM_IDS), k=case.prompt_tokens)
    async for response in stub.Generate(token_request(prompt, case.max_tokens, request_id=request_id)):
        if response.HasField("delta"):
            found.token_at[request_id].append(time.monotonic())


async def _until_each_has(found: Round, count: int, reading: list[asyncio.Task[None]], after: float = 0.0) -> None:
    """Waits until each stream has `count` tokens since `after`. Raises the error of a stream that has failed."""
    while any(sum(at > after for at in times[-count:]) < count for times in found.token_at.values()):
        for task in reading:
            if task.done():
                task.result()
        await asyncio.sleep(0.01)


async def _kill(stack: Stack, found: Round, random: Random) -> None:
    """Kills one worker, and starts it again when the other has all streams."""
    victim = random.choice(_WORKERS)
    await asyncio.sleep(random.uniform(0.2, 0.5))
    found.killed_at = time.monotonic()
    stack.processes[victim].kill()
    await until_workers(stack, len(_WORKERS) - 1)
    streams = len(found.token_at)
    await asyncio.to_thread(stack.wait_for, lambda: stack.load().running == streams, 60.0)
    stack.processes[victim].wait()
    stack.start_named(victim)


def _row(case: str, rounds: list[Round], losses: list[Loss]) -> FailoverRow:
    assert len(losses) == len(rounds), f"{len(losses)} losses for {len(rounds)} kills"
    moved = [(found, loss, *item) for found, loss in zip(rounds, losses, strict=True) for item in loss.moved.items()]
    gaps = [found.gap(request_id) for found, _, request_id, _ in moved]
    recomputing = [each.answered_at - each.planned_at for *_, each in moved]
    queueing = [each.planned_at - loss.at for _, loss, _, each in moved]
    beside = [gap - seconds for gap, seconds in zip(gaps, recomputing, strict=True)]
    return FailoverRow(
        case=case,
        kills=len(rounds),
        streams_moved=len(moved),
        gap=TimeSpread.of(gaps),
        beside=TimeSpread.of(beside),
        unspent=TimeSpread.of([gap - seconds for gap, seconds in zip(beside, queueing, strict=True)]),
        undisturbed=TimeSpread.of(list(_undisturbed(rounds, losses))),
        detect=TimeSpread.of([loss.at - found.killed_at for found, loss, *_ in moved]),
        queue=TimeSpread.of(queueing),
        recompute=TimeSpread.of(recomputing),
        deliver=TimeSpread.of([_delivery(found, request_id, each) for found, _, request_id, each in moved]),
    )


def _undisturbed(rounds: list[Round], losses: list[Loss]) -> Iterator[float]:
    for found, loss in zip(rounds, losses, strict=True):
        yield from (found.gap(request_id) for request_id in found.token_at if request_id not in loss.moved)


def _delivery(found: Round, request_id: str, moved: Moved) -> float:
    return found.delivered_at(request_id, moved.answered_at) - moved.answered_at


if __name__ == "__main__":
    sys.exit(main())
