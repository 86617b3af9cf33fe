"""Simulates GPUs apart for prompts and for what follows them: `python -m octavo.bench.whole.roles_simulated`.

Two replicas of one model, by published data of model and GPU: streams come all the time, and long prompts, for a few
tokens, as often as said. Printed are, for each load, the times between the streams' tokens and until first tokens: with
both replicas for everything (`both`), also in smaller steps, and with one for prompts and one for what follows
(`apart`). What moves goes over a link of so many GB/s; on real GPUs nothing moves yet but what is swapped out.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import Final

from octavo.bench.table import keep, table
from octavo.scheduler.core.config import SchedulerConfig
from octavo.simulator import hardware
from octavo.simulator.device import PeerLink, ReplicaSpec
from octavo.simulator.engine import Cluster, Simulation
from octavo.simulator.hardware import GPUS, MODELS
from octavo.wire.steps import WorkerRole
from octavo.workload.job import Job
from octavo.workload.measures import Served, percentile
from octavo.workload.synthetic import Poisson

_BOTH: Final = (WorkerRole.BOTH, WorkerRole.BOTH)
_APART: Final = (WorkerRole.PREFILL, WorkerRole.DECODE)
_LONG_TOKENS: Final = 16
# Each copy takes so long besides.
_COPY_S: Final = 1e-3


@dataclass(frozen=True)
class Case:
    """Describes how two replicas share the load, in steps of so many tokens (None: as many as suit the device)."""

    name: str
    roles: tuple[WorkerRole, WorkerRole]
    step_tokens: int | None


@dataclass(frozen=True)
class Load:
    """Describes streams of so many tokens of prompt and of answer, and long prompts; both come at random times."""

    seconds: float
    streams_per_s: float
    prompt_tokens: int
    answer_tokens: int
    longs_per_s: float
    long_tokens: int

    def jobs(self) -> list[Job]:
        """Returns the same for the same load; the streams do not depend on the long prompts."""
        streams = (Job(at, self.prompt_tokens, self.answer_tokens) for at in self._times(self.streams_per_s, "streams"))
        longs = (Job(at, self.long_tokens, _LONG_TOKENS) for at in self._times(self.longs_per_s, "longs"))
        return sorted((*streams, *longs), key=lambda job: job.arrival_s)

    def _times(self, rate: float, name: str) -> Iterator[float]:
        times = Poisson(rate).times(Random(name)) if rate else iter(())
        return takewhile(lambda at: at < self.seconds, times)


@dataclass(frozen=True)
class SimulatedRow:
    """Holds the figures of one case under one load, in milliseconds: between tokens, by single pauses; between those of
    a stream, on average for each; and until first tokens of streams, and of long prompts (none: there were none)."""

    case: str
    longs_per_s: float
    pauses: tuple[float, float, float]
    between: tuple[float, float]
    first: tuple[float, float]
    long_first: tuple[float, float] | None
    moved: int
    moved_gb: float

    def cells(self) -> tuple[str, ...]:
        times = (self.pauses, self.between, self.first, self.long_first)
        return (
            f"{self.longs_per_s:g}",
            self.case,
            *(" / ".join(f"{each:.0f}" if each >= 100 else f"{each:.1f}" for each in ms or ()) or "-" for ms in times),
            f"{self.moved} ({self.moved_gb:.1f} GB)",
        )


def measure(case: Case, load: Load, replica: ReplicaSpec) -> SimulatedRow:
    """Simulates one case under one load."""
    config = SchedulerConfig(max_num_batched_tokens=case.step_tokens)
    outcome = Simulation(Cluster(config, [replace(replica, role=role) for role in case.roles])).run(load.jobs())
    pauses = outcome.gaps.spread()
    assert pauses is not None, "no stream has two tokens"
    streams = [each for each in outcome.served if each.job.output_tokens != _LONG_TOKENS]
    longs = [each for each in outcome.served if each.job.output_tokens == _LONG_TOKENS]
    return SimulatedRow(
        case=case.name,
        longs_per_s=load.longs_per_s,
        pauses=(1000 * pauses.p50, 1000 * pauses.p99, 1000 * pauses.max),
        between=_both_percentiles([_between(each) for each in streams]),
        first=_both_percentiles([each.ttft or 0.0 for each in streams]),
        long_first=_both_percentiles([each.ttft or 0.0 for each in longs]) if longs else None,
        moved=outcome.copied.requests,
        moved_gb=outcome.copied.nbytes / 1e9,
    )


def _between(served: Served) -> float:
    assert served.first_token_s is not None, f"{served.job} has failed: {served.error}"
    assert served.finished_s is not None, f"{served.job} has failed: {served.error}"
    return (served.finished_s - served.first_token_s) / (served.job.output_tokens - 1)


def _both_percentiles(seconds: list[float]) -> tuple[float, float]:
    ordered = sorted(seconds)
    return 1000 * percentile(ordered, 50), 1000 * percentile(ordered, 99)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table, and writes JSON where asked."""
    parser = argparse.ArgumentParser(prog="octavo.bench.whole.roles_simulated", description=__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="llama-3.1-8b")
    parser.add_argument("--gpu", choices=list(GPUS), default="h200")
    parser.add_argument("--bandwidth", type=float, default=25.0, help="GB/s between two replicas")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--streams", type=float, default=10.0, help="that come in a second")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--answer-tokens", type=int, default=512)
    parser.add_argument("--long-tokens", type=int, default=16384)
    parser.add_argument("--longs", type=float, nargs="+", default=[0.0, 0.5, 1.0, 2.0], help="in a second")
    parser.add_argument("--step-tokens", type=int, default=2048, help="of a smaller step")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.answer_tokens <= _LONG_TOKENS:
        parser.error(f"--answer-tokens must be above {_LONG_TOKENS}, those of a long prompt's answer")
    replica = hardware.replica(MODELS[options.model], GPUS[options.gpu])
    replica = replace(replica, peer_link=PeerLink(replica.block_bytes / (options.bandwidth * 1e9), _COPY_S))
    cases = (
        Case("both", _BOTH, None),
        Case(f"both, steps of {options.step_tokens}", _BOTH, options.step_tokens),
        Case(f"apart, steps of {options.step_tokens}", _APART, options.step_tokens),
    )
    found = []
    for longs in options.longs:
        sizes = (options.prompt_tokens, options.answer_tokens, longs, options.long_tokens)
        load = Load(options.seconds, options.streams, *sizes)
        found += [measure(case, load, replica) for case in cases]
    heads = (
        "longs/s",
        "replicas",
        "pauses, p50/p99/max",
        "of a stream, p50/p99",
        "first, p50/p99",
        "of longs",
        "moved",
    )
    print("\n".join(table([heads, *(each.cells() for each in found)])))
    keep(found, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
