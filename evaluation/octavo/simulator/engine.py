"""Simulates a cluster: takes jobs and returns what became of them."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

from octavo.simulator.cell import Cell
from octavo.simulator.clients import ask
from octavo.simulator.shard import Arrival, CellOutcome, Cluster, Shard, ShardProcess, Standing
from octavo.simulator.timeline import Probe, Sample
from octavo.wire.requests import Request
from octavo.workload.job import Job, prompt_token_ids
from octavo.workload.measures import Gaps, Served

__all__ = ["Cluster", "Outcome", "Simulation"]

# SchedulerPool know nothing of each other within a second; so each goes through it alone, which is kinder to the CPU's
# caches, and lets several processes share them.
_WINDOW_S = 1.0

_Each = TypeVar("_Each")

# Which cell a request goes to that comes at this time.
Route = Callable[[Request, float, Sequence[Standing]], int]


@dataclass
class Outcome:
    """Holds the results of a simulation, jobs in the order of arrival. `busy_share` is the share of the replicas' time
    in which they computed."""

    served: list[Served]
    gaps: Gaps
    seconds: float
    steps: int
    busy_share: float
    preemptions: int
    swaps: int
    samples: list[Sample] = field(default_factory=list)


class Simulation:
    """Simulates a cluster: deterministic for its seed, and the same with any number of `processes`, to which the cells
    are dealt out.

    `route` is needed with more than one cell; `probe` sees every core at every sample, each `sample_every_s` (0:
    never), but those of this process alone.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        seed: int = 0,
        route: Route | None = None,
        sample_every_s: float = 0.0,
        probe: Probe | None = None,
        processes: int = 1,
    ) -> None:
        if cluster.cells > 1 and route is None:
            raise ValueError("with more than one cell, somebody must say which a request goes to")
        if not 1 <= processes <= cluster.cells:
            raise ValueError(f"{cluster.cells} cells cannot be dealt out to {processes} processes")
        if processes > 1 and probe is not None:
            raise ValueError("a probe cannot see the cores of other processes")
        self._cluster = cluster
        self._seed = seed
        self._route = route
        self._sample_every_s = sample_every_s
        self._processes = processes
        numbers = range(0, cluster.cells, processes)
        self._here = Shard(cluster, numbers, seed=seed, sample_every_s=sample_every_s, probe=probe)

    @property
    def cells(self) -> list[Cell]:
        """Returns the cells that this process simulates itself."""
        return self._here.cells

    def run(
        self, jobs: Sequence[Job], horizon_s: float = float("inf"), passed: Callable[[float], None] | None = None
    ) -> Outcome:
        """Runs until all jobs are done, or `horizon_s` has come. Calls `passed` now and then with the time that has
        been simulated. Raises `SimulationError` if the simulation cannot go on."""
        with ExitStack() as stack:
            others = [self._start(place, stack) for place in range(1, self._processes)]
            return self._run(others, jobs, horizon_s, passed)

    def _start(self, place: int, stack: ExitStack) -> ShardProcess:
        numbers = range(place, self._cluster.cells, self._processes)
        process = ShardProcess(self._cluster, numbers, seed=self._seed, sample_every_s=self._sample_every_s)
        stack.callback(process.close)
        return process

    def _run(
        self,
        others: Sequence[ShardProcess],
        jobs: Sequence[Job],
        horizon_s: float,
        passed: Callable[[float], None] | None,
    ) -> Outcome:
        arrivals = deque(sorted(enumerate(jobs), key=lambda each: each[1].arrival_s))
        standings = _interleaved([self._here.standings(), *(process.end_start() for process in others)])
        while (begin := _next_at(arrivals, standings)) < horizon_s:
            end = min(begin // _WINDOW_S * _WINDOW_S + _WINDOW_S, horizon_s)
            shares: list[list[Arrival]] = [[] for _ in range(self._processes)]
            while arrivals and arrivals[0][1].arrival_s < end:
                arrival = self._arrival(*arrivals.popleft(), standings)
                shares[arrival.cell % self._processes].append(arrival)
            for process, share in zip(others, shares[1:], strict=True):
                process.begin_run(share, end)
            here = self._here.run(shares[0], end)
            standings = _interleaved([here, *(process.end_run() for process in others)])
            if passed is not None:
                passed(end)
        is_over = not arrivals and all(each.is_idle for each in standings)
        seconds = max(each.moved_at for each in standings) if is_over else horizon_s
        outcomes = [self._here.finish(seconds), *(process.finish(seconds) for process in others)]
        return self._outcome(_interleaved(outcomes), seconds)

    def _arrival(self, index: int, job: Job, standings: Sequence[Standing]) -> Arrival:
        """Routes a job to a cell. Frontends choose the cell by what they know of the cells, which is of the last full
        second."""
        model = self._cluster.replicas[0]
        prompt = prompt_token_ids(job, index, model.vocab_size, self._seed)
        request = ask(index, job, prompt, model.model.fingerprint)
        cell = self._route(request, job.arrival_s, standings) if self._route is not None else 0
        return Arrival(cell, index, job, request)

    def _outcome(self, cells: Sequence[CellOutcome], seconds: float) -> Outcome:
        served = [each for cell in cells for each in cell.served]
        served.sort(key=lambda each: (each[1].job.arrival_s, each[0]))
        gaps = Gaps()
        for cell in cells:
            gaps.merge(cell.gaps)
        replica_s = seconds * len(self._cluster.replicas)
        return Outcome(
            served=[each for _, each in served],
            gaps=gaps,
            seconds=seconds,
            steps=sum(cell.steps for cell in cells),
            busy_share=sum(cell.busy_s for cell in cells) / replica_s if replica_s else 0.0,
            preemptions=sum(cell.preemptions for cell in cells),
            swaps=sum(cell.swaps for cell in cells),
            samples=[Sample.total(shares) for shares in zip(*(cell.samples for cell in cells), strict=True)],
        )


def _next_at(arrivals: Sequence[tuple[int, Job]], standings: Sequence[Standing]) -> float:
    first = min(each.next_at for each in standings)
    return min(first, arrivals[0][1].arrival_s) if arrivals else first


def _interleaved(shares: Sequence[Sequence[_Each]]) -> list[_Each]:
    """Returns what `len(shares)` processes hold for their cells, in the order of all cells, which were dealt out in
    turn."""
    num = sum(map(len, shares))
    return [shares[number % len(shares)][number // len(shares)] for number in range(num)]
