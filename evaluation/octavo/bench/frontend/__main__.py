"""Measures what the frontend costs and adds: `python -m octavo.bench.frontend [CASES] [--json FILE]`.

A frontend as its users run it, with the bundled model's tokenizer; behind it a scheduler that keeps time and computes
nothing, before it clients that know nothing but where a message begins. All are processes of their own, connected by
TCP on this machine. CPU time is the frontend's alone, user and system, as the kernel counts it: what it could do with a
whole core follows from that, and the load is such that it need not share one. Latency is from the moment before a
step's message leaves the scheduler until the client has read the token; all streams get a token in each step.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from octavo.bench.frontend.load import Receipts, StreamLoad
from octavo.bench.frontend.processes import Frontend, Rig
from octavo.bench.measurement import machine_cpu_s, process_cpu_s
from octavo.bench.table import keep
from octavo.runtime.models.directory import BUNDLED_MODEL, resolve_model
from octavo.testbed.credentials import bearer, write_keys
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services

_PROMPT: Final = "All work and no play. "
# Beyond what is tokenized in a thread, so that the processes for texts are started.
_LONG_PROMPT: Final = 60 * _PROMPT
_STREAMS: Final = 64
_MANY: Final = 1000
_CALLS: Final = 500
_INTERFACES: Final[dict[str, tuple[str, str, int, dict[str, Any]]]] = {
    "grpc": ("grpc_load", "gRPC, 1 connection", 8000, {"connections": 1}),
    "grpc-many": ("grpc_load", f"gRPC, {_STREAMS} connections", 8000, {"connections": _STREAMS}),
    "completions": ("sse_load", "SSE, completions", 4000, {"api": "completions"}),
    "chat": ("sse_load", "SSE, chat", 4000, {"api": "chat"}),
    "messages": ("sse_load", "SSE, messages", 4000, {"api": "messages"}),
    "responses": ("sse_load", "SSE, responses", 4000, {"api": "responses"}),
}
_CASES: Final = ("streams", "many", "refused", "two")


@dataclass(frozen=True)
class Streamed:
    """Holds the figures of one load on one interface. Rates are tokens per second: sent in all, and by a core that does
    nothing else."""

    door: str
    sent_per_s: float
    per_core: float
    goal_per_core: float
    tokens_per_event: float
    p50_ms: float
    p99_ms: float
    others_share: float


@dataclass(frozen=True)
class HeldMemory:
    """Holds memory in MiB: of the frontend at rest and with all streams, and of the frontend and its text processes
    together."""

    streams: int
    rest_rss: float
    own_rss: float
    processes: int
    rss: float
    pss: float
    anonymous: float


@dataclass(frozen=True)
class RefusedCost:
    """Holds the CPU time of a call that is refused."""

    door: str
    why: str
    outcome: str
    us: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table, and writes JSON where asked."""
    options = _options(arguments)
    with tempfile.TemporaryDirectory(prefix="octavo-") as name:
        bench = _Bench(resolve_model(BUNDLED_MODEL), Path(name), options.seconds)
        found = {case: list(_printed(_RUNS[case](bench, options))) for case in options.cases}
    keep(found, options.json)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="octavo.bench.frontend", description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(_CASES), metavar="CASE", help=f"of {', '.join(_CASES)}")
    parser.add_argument("--doors", nargs="+", choices=list(_INTERFACES), default=list(_INTERFACES))
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5], help="shares of the goal that are sent")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each load")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def _printed(rows: Iterator[Any]) -> Iterator[Any]:
    """Prints each row as soon as it is there."""
    for row in rows:
        print("  ".join(f"{name} {_shown(value)}" for name, value in asdict(row).items()), flush=True)
        yield row


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class _Bench:
    """Makes rigs, and plays loads on them."""

    def __init__(self, model: Path, directory: Path, seconds: float) -> None:
        self._model = model
        self.directory = directory
        self._seconds = seconds
        self._rigs = 0

    def rig(self) -> Rig:
        self._rigs += 1
        return Rig(self._model, self.directory / str(self._rigs))

    def warm_up(self, rig: Rig, frontend: Frontend, interface: str) -> None:
        self.play(rig, [frontend], interface, streams=8, rate=400, tokens=20)

    def streamed(self, rig: Rig, frontends: Sequence[Frontend], interface: str, share: float) -> Streamed:
        """Loads each frontend with `_STREAMS` streams, at a share of the goal of one frontend."""
        _, title, goal, _ = _INTERFACES[interface]
        rate = share * goal * len(frontends)
        played = self.play(rig, frontends, interface, streams=_STREAMS, rate=rate)
        return Streamed(
            f"{title}{f', {len(frontends)} frontends' * (len(frontends) > 1)}",
            played.tokens / played.wall_s,
            played.tokens / played.cpu_s,
            goal,
            played.tokens / played.events,
            *_quantiles(played.latencies_s),
            played.others_share,
        )

    def play(
        self, rig: Rig, frontends: Sequence[Frontend], interface: str, streams: int, rate: float, tokens: int = 0
    ) -> "_Played":
        """Runs `streams` on each frontend, with `rate` tokens per second in all."""
        module, _, _, settings = _INTERFACES[interface]
        interval_s = streams * len(frontends) / rate
        tokens = tokens or max(20, round(self._seconds / interval_s))
        rig.scheduler.tell(json.dumps({"streams": streams * len(frontends), "interval_s": interval_s}))
        loads = [rig.load(module, asdict(_load(f, module, streams, tokens, settings))) for f in frontends]
        rig.scheduler.line(loads)
        before, machine, began = _cpu_s(frontends), machine_cpu_s(), time.monotonic()
        sent = json.loads(rig.scheduler.line(loads))["sent"]
        receipts = [one for load in loads for one in json.loads(load.line())]
        wall_s = time.monotonic() - began
        used = _cpu_s(frontends) - before
        return _Played(sent, receipts, used, sent[-1] - sent[0] + interval_s, machine_cpu_s() - machine, wall_s)


def _load(frontend: Frontend, module: str, streams: int, tokens: int, settings: dict[str, Any]) -> StreamLoad:
    port = frontend.grpc_port if module == "grpc_load" else frontend.http_port
    return StreamLoad(port, streams, tokens, _PROMPT, **settings)


@dataclass(frozen=True)
class _Played:
    sent: list[float]
    receipts: list[Receipts]
    cpu_s: float
    wall_s: float
    machine_s: float
    elapsed_s: float

    @property
    def tokens(self) -> int:
        return len(self.sent) * len(self.receipts)

    @property
    def events(self) -> int:
        return sum(map(len, self.receipts))

    @property
    def others_share(self) -> float:
        """Returns the share of the machine's cores that all other processes used, the rest of the rig included."""
        return (self.machine_s - self.cpu_s) / (self.elapsed_s * (os.cpu_count() or 1))

    @property
    def latencies_s(self) -> list[float]:
        return [at - sent for one in self.receipts for at, sent in zip(_by_token(one), self.sent, strict=True)]


def _by_token(receipts: Receipts) -> Iterator[float]:
    return (at for at, count in receipts for _ in range(count))


def _quantiles(latencies_s: list[float]) -> tuple[float, float]:
    ordered = sorted(latencies_s)
    return 1000 * ordered[len(ordered) // 2], 1000 * ordered[len(ordered) * 99 // 100]


def _cpu_s(frontends: Sequence[Frontend]) -> float:
    return sum(process_cpu_s(frontend.pid) for frontend in frontends)


# -- cases ------------------------------------------------------------------------------------------------------


def _streams(bench: _Bench, options: argparse.Namespace) -> Iterator[Streamed]:
    with bench.rig() as rig:
        frontend = rig.frontend()
        for interface in options.doors:
            bench.warm_up(rig, frontend, interface)
        for _ in range(options.repeat):
            for share in options.loads:
                for interface in options.doors:
                    yield bench.streamed(rig, [frontend], interface, share)


def _two(bench: _Bench, options: argparse.Namespace) -> Iterator[Streamed]:
    """Measures one frontend and two, with the same load on each."""
    with bench.rig() as rig:
        frontends = [rig.frontend(), rig.frontend()]
        for frontend in frontends:
            bench.warm_up(rig, frontend, "grpc")
        for used in (frontends[:1], frontends):
            yield bench.streamed(rig, used, "grpc", 0.25)


def _many(bench: _Bench, options: argparse.Namespace) -> Iterator[HeldMemory]:
    with bench.rig() as rig:
        frontend = rig.frontend()
        rest = _memory([frontend.pid])["Rss"]
        rig.scheduler.tell(json.dumps({"streams": _MANY, "interval_s": 0.5}))
        load = rig.load("grpc_load", asdict(StreamLoad(frontend.grpc_port, _MANY, 30, _LONG_PROMPT, connections=8)))
        rig.scheduler.line([load])
        time.sleep(10)
        own, held = _memory([frontend.pid]), _memory(frontend.tree)
        row = HeldMemory(_MANY, rest, own["Rss"], len(frontend.tree), held["Rss"], held["Pss"], held["Anonymous"])
        rig.scheduler.line([load])
        load.line()
        yield row


def _memory(pids: Sequence[int]) -> dict[str, float]:
    """Returns memory in MiB, by the names of /proc/PID/smaps_rollup."""
    total = {"Rss": 0.0, "Pss": 0.0, "Anonymous": 0.0}
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in total:
                total[name] += int(rest.split()[0]) / 1024
    return total


def _refused(bench: _Bench, options: argparse.Namespace) -> Iterator[RefusedCost]:
    keys = write_keys(bench.directory / "keys.json")
    alice = {"authorization": bearer("alice")}
    with bench.rig() as rig:
        frontend = rig.frontend("--api-keys", str(keys), "--tenant-max-work-tokens", "4000")
        yield from _each_interface(rig, frontend, "bad key", authorization="Bearer sk-nobody")
        yield from _each_interface(rig, frontend, "bad field", temperature=-1.0, **alice)
        rig.scheduler.tell(json.dumps({"streams": 1 << 30, "interval_s": 1.0, "rejects": True}))
        yield from _each_interface(rig, frontend, "queue full", **alice)
        rig.scheduler.tell(json.dumps({"streams": 1 << 30, "interval_s": 1.0}))
        with _held_back(frontend, bearer("alice"), 4000):
            yield from _each_interface(rig, frontend, "quota", **alice)


def _each_interface(rig: Rig, frontend: Frontend, why: str, **settings: Any) -> Iterator[RefusedCost]:
    for interface, port in (("grpc", frontend.grpc_port), ("http", frontend.http_port)):
        setup = {"interface": interface, "port": port, "count": _CALLS, "prompt": _PROMPT, **settings}
        client = rig.load("refused_calls", setup)
        outcome = client.line()
        idle = _cpu_per_s(frontend, lambda: time.sleep(2.0))
        client.tell("")
        began, before = time.monotonic(), process_cpu_s(frontend.pid)
        client.line()
        used = process_cpu_s(frontend.pid) - before - idle * (time.monotonic() - began)
        yield RefusedCost(interface, why, outcome, used / _CALLS * 1e6)


@contextlib.contextmanager
def _held_back(frontend: Frontend, authorization: str, tokens: int) -> Iterator[None]:
    """Runs a request of so many tokens inside the block."""
    request = pb.GenerateRequest(text=_PROMPT, stopping=pb.StoppingCriteria(max_new_tokens=tokens))
    with grpc.insecure_channel(f"127.0.0.1:{frontend.grpc_port}") as channel:
        call = services.GenerationServiceStub(channel).Generate(request, metadata=(("authorization", authorization),))
        time.sleep(1.0)
        yield
        call.cancel()


def _cpu_per_s(frontend: Frontend, wait: Callable[[], object]) -> float:
    began, before = time.monotonic(), process_cpu_s(frontend.pid)
    wait()
    return (process_cpu_s(frontend.pid) - before) / (time.monotonic() - began)


_RUNS: Final[dict[str, Callable[[_Bench, argparse.Namespace], Iterator[Any]]]] = {
    "streams": _streams,
    "many": _many,
    "refused": _refused,
    "two": _two,
}

if __name__ == "__main__":
    sys.exit(main())
