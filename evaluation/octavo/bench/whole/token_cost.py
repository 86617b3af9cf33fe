"""Measures what a token costs around the model, in CPU time of scheduler and frontend: `python -m
octavo.bench.whole.token_cost`.

Both run as their users run them, with one worker whose device computes nothing: its steps last as long as a model's
and leave the cores to what is measured. Clients know nothing but where a message begins, and are connected by TCP on
this machine. CPU time is what the kernel has counted for a process, user and system, of all its threads, over whole
requests: so what goes on at all times is in it, and counts for more where tokens are slow. With `--floor` the same
loads over gRPC are applied to what takes these processes' place with their libraries alone (`token_floor.py`).
"""

import abc
import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Self

from octavo.bench.frontend import grpc_load, sse_load
from octavo.bench.frontend.load import Receipts, StreamLoad, check
from octavo.bench.frontend.processes import Frontend, Line, plain_tokens
from octavo.bench.measurement import process_cpu_s, thread_cpu_s, wake_ups
from octavo.bench.table import keep, table
from octavo.bench.whole.token_floor import FloorSetup
from octavo.runtime.models.directory import BUNDLED_MODEL, resolve_model
from octavo.testbed.stack import Stack

_PROMPT: Final = "All work and no play. "
_NUM_TOKENS: Final = 4
# Enough for every load, and little to hash for a device that reads all of it in each step.
_BLOCKS: Final = "2048"


@dataclass(frozen=True)
class TokenLoad:
    """Describes a load: `streams` of `tokens` each over an interface, in steps of `step_ms`."""

    interface: str
    streams: int
    tokens: int
    step_ms: float


# A small model's steps with quantised weights and without, one stream; and its steps of 64.
LOADS: Final = (
    TokenLoad("gRPC", 1, 1600, 2.5),
    TokenLoad("gRPC", 1, 1000, 7.0),
    TokenLoad("gRPC", 64, 64, 40.0),
    TokenLoad("completions", 1, 1600, 2.5),
    TokenLoad("completions", 64, 64, 40.0),
    TokenLoad("chat", 1, 1600, 2.5),
    TokenLoad("chat", 64, 64, 40.0),
)
# Of scheduler and frontend together, by the number of streams.
GOALS_MS: Final = {1: 0.4, 64: 0.08}


@dataclass(frozen=True)
class TokenCost:
    """Holds what a load cost: milliseconds of CPU a token, and how often a process slept and was woken for one.

    `worker_ms` is the main loop of the worker, with what its device takes to choose a token. `token_ms`: the time from
    token to token of a stream. `is_floor`: of libraries alone.
    """

    load: TokenLoad
    scheduler_ms: float
    frontend_ms: float
    worker_ms: float
    scheduler_wake_ups: float
    frontend_wake_ups: float
    token_ms: float
    is_floor: bool = False

    @property
    def together_ms(self) -> float:
        """Returns what scheduler and frontend take together."""
        return self.scheduler_ms + self.frontend_ms


@dataclass(frozen=True)
class _Spent:
    """Holds what processes have taken since their start: seconds, and wake-ups."""

    scheduler_s: float
    frontend_s: float
    worker_s: float
    scheduler_wake_ups: int
    frontend_wake_ups: int


class _Measured(contextlib.ExitStack, abc.ABC):
    """Runs processes that answer streams; all end with the `with` block."""

    is_floor = False

    def measure(self, load: TokenLoad) -> TokenCost:
        """Applies a load, after a little of the same that is not counted."""
        self._apply(load, min(16, load.tokens))
        before = self._spent()
        receipts = self._apply(load, load.tokens)
        spent = self._spent()
        count = load.streams * load.tokens

        def each(what: Callable[[_Spent], float]) -> float:
            return (what(spent) - what(before)) / count

        return TokenCost(
            load,
            1000 * each(lambda one: one.scheduler_s),
            1000 * each(lambda one: one.frontend_s),
            1000 * each(lambda one: one.worker_s),
            each(lambda one: one.scheduler_wake_ups),
            each(lambda one: one.frontend_wake_ups),
            1000 * max((one[-1][0] - one[0][0]) / max(1, load.tokens - 1) for one in receipts),
            self.is_floor,
        )

    @abc.abstractmethod
    def _apply(self, load: TokenLoad, tokens: int) -> list[Receipts]:
        """Reads streams of `tokens` tokens until they end. Raises `RuntimeError` if others come."""

    @abc.abstractmethod
    def _spent(self) -> _Spent: ...


class Floor(_Measured):
    """Runs what takes the places of a cell's processes with their libraries alone, for the loads of some streams."""

    is_floor = True

    def __init__(self, streams: int, step_ms: float) -> None:
        super().__init__()
        self._streams, self._step_ms = streams, step_ms

    def __enter__(self) -> Self:
        super().__enter__()
        directory = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="octavo-")))
        places = (f"ipc://{directory}/{name}.sock" for name in ("frontends", "workers"))
        setup = json.dumps(asdict(FloorSetup(*places, self._streams, self._step_ms)))
        self._lines = dict[str, Line]()
        for role in ("scheduler", "frontend", "worker"):
            self._lines[role] = line = Line(["octavo.bench.whole.token_floor", role, setup], directory / f"{role}.log")
            self.callback(line.close)
        self._port = int(self._lines["frontend"].line())
        self._lines["worker"].line()
        return self

    def _apply(self, load: TokenLoad, tokens: int) -> list[Receipts]:
        asked = StreamLoad(self._port, load.streams, tokens, _PROMPT)
        return check(asked, grpc_load.load(asked))

    def _spent(self) -> _Spent:
        scheduler, frontend = (self._lines[role].process.pid for role in ("scheduler", "frontend"))
        return _Spent(process_cpu_s(scheduler), process_cpu_s(frontend), 0.0, wake_ups(scheduler), wake_ups(frontend))


class Cell(_Measured):
    """Runs a scheduler, a frontend and a worker that computes nothing."""

    def __init__(self, model: Path, step_ms: float) -> None:
        super().__init__()
        self._model, self._step_ms = model, step_ms
        # A few, which the device chooses from at once. They come again and again, as the tokens of a text do.
        self._tokens = plain_tokens(model)[:_NUM_TOKENS]

    def __enter__(self) -> Self:
        super().__enter__()
        directory = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="octavo-")))
        self._stack = stack = self.enter_context(Stack(self._model, directory))
        stack.start("scheduler")
        fake = {"OCTAVO_DEVICE": "fake", "OCTAVO_FAKE_STEP_MS": str(self._step_ms), "OCTAVO_NUM_BLOCKS": _BLOCKS}
        stack.start_named("worker-0", **fake)
        self._frontend = Frontend(self._model, f"ipc://{directory}/frontends.sock", directory, (), {})
        self.callback(self._frontend.close)
        self._frontend.wait_ready()
        return self

    def _apply(self, load: TokenLoad, tokens: int) -> list[Receipts]:
        over_grpc, frontend = load.interface == "gRPC", self._frontend
        port, api = (frontend.grpc_port, "") if over_grpc else (frontend.http_port, load.interface)
        asked = StreamLoad(port, load.streams, tokens, _PROMPT, api=api, among=self._tokens)
        return check(asked, (grpc_load if over_grpc else sse_load).load(asked))

    def _spent(self) -> _Spent:
        scheduler, worker = (self._stack.processes[name].pid for name in ("scheduler", "worker-0"))
        return _Spent(
            process_cpu_s(scheduler),
            process_cpu_s(self._frontend.pid),
            thread_cpu_s(worker),
            wake_ups(scheduler),
            wake_ups(self._frontend.pid),
        )


def usual_loads(*, quick: bool = False) -> list[TokenLoad]:
    """Returns a load of one stream and one of many, as `make bench` reports them. `quick` ones are too short to tell
    anything."""
    loads = [TokenLoad("gRPC", 1, 1600, 2.5), TokenLoad("gRPC", 64, 64, 40.0)]
    return [replace(load, tokens=8) for load in loads] if quick else loads


def measure(model: Path, loads: Sequence[TokenLoad], repeat: int = 1) -> Iterator[TokenCost]:
    """Yields the cost of each load, the least of `repeat` times. A cell is started for each length of steps."""
    for step_ms in dict.fromkeys(load.step_ms for load in loads):
        with Cell(model, step_ms) as cell:
            for load in loads:
                if load.step_ms == step_ms:
                    yield min((cell.measure(load) for _ in range(repeat)), key=lambda cost: cost.together_ms)


def measure_floors(loads: Sequence[TokenLoad], repeat: int = 1) -> Iterator[TokenCost]:
    """Yields what libraries alone take for each load over gRPC, the least of `repeat` times."""
    for load in loads:
        if load.interface == "gRPC":
            with Floor(load.streams, load.step_ms) as floor:
                yield min((floor.measure(load) for _ in range(repeat)), key=lambda cost: cost.together_ms)


def to_lines(costs: Sequence[TokenCost]) -> Iterator[str]:
    """Yields the lines of a table."""
    heads = ("CPU ms of a token", "scheduler", "frontend", "together", "goal", "worker's loop", "wake-ups", "ms/token")
    yield from table([heads, *map(_cells, costs)])


def _cells(cost: TokenCost) -> tuple[str, ...]:
    load = cost.load
    return (
        f"{'libraries alone, ' * cost.is_floor}{load.interface}, {load.streams} stream{'s' * (load.streams > 1)},"
        f" steps of {load.step_ms:g} ms",
        f"{cost.scheduler_ms:.3f}",
        f"{cost.frontend_ms:.3f}",
        f"{cost.together_ms:.3f}",
        f"{GOALS_MS[load.streams]:g}" if load.streams in GOALS_MS and not cost.is_floor else "",
        "" if cost.is_floor else f"{cost.worker_ms:.3f}",
        f"{cost.scheduler_wake_ups:.2f} + {cost.frontend_wake_ups:.2f}",
        f"{cost.token_ms:.2f}",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table, and writes JSON where asked."""
    parser = argparse.ArgumentParser(prog="octavo.bench.whole.token_cost", description=__doc__)
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument(
        "--interfaces", nargs="+", choices=["gRPC", "completions", "chat"], default=["gRPC", "completions", "chat"]
    )
    parser.add_argument("--streams", nargs="+", type=int, choices=sorted(GOALS_MS), default=sorted(GOALS_MS))
    parser.add_argument("--repeat", type=int, default=1, help="of each load; the least counts")
    parser.add_argument("--floor", action="store_true", help="measure what libraries alone take too, over gRPC")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    loads = [load for load in LOADS if load.interface in options.interfaces and load.streams in options.streams]
    costs = list(measure(resolve_model(options.model), loads, options.repeat))
    if options.floor:
        costs += measure_floors(loads, options.repeat)
    print("\n".join(to_lines(costs)))
    keep(costs, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
