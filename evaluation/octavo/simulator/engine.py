"""A cluster that is simulated: jobs in, what became of them out."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.strategy import Strategy
from octavo.simulator.cell import Cell
from octavo.simulator.clients import Clients
from octavo.simulator.device import ReplicaSpec
from octavo.simulator.timeline import Probe, Sample, Timeline
from octavo.wire.requests import Prefix, Request
from octavo.workload.job import Job
from octavo.workload.measures import Gaps, Served
from octavo.workload.tokens import prompt_token_ids

# Cells know nothing of each other within a second; so each goes through it alone, which is kinder to the CPU's caches.
_WINDOW_S = 1.0

# Which cell a request goes to that comes at this time.
Route = Callable[[Request, float, Sequence[Cell]], int]


@dataclass(frozen=True)
class Cluster:
    """What is simulated: `cells` schedulers, to which `replicas` are dealt out. `pinned` prefixes are kept by all.
    Raises `ValueError` if a cell would have no replica."""

    config: SchedulerConfig
    replicas: Sequence[ReplicaSpec]
    cells: int = 1
    strategy: Strategy | None = None
    # Seconds of a message from scheduler to worker, or back.
    link_s: float = 0.0
    pinned: Sequence[Prefix] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.cells <= len(self.replicas):
            raise ValueError(f"{len(self.replicas)} replicas cannot be dealt out to {self.cells} cells")


@dataclass
class Outcome:
    """How a simulation went, in the order of arrival. `busy_share` is that of the replicas' time."""

    served: list[Served]
    gaps: Gaps
    seconds: float
    steps: int
    busy_share: float
    preemptions: int
    swaps: int
    samples: list[Sample] = field(default_factory=list)


class Simulation:
    """Deterministic for its seed. `route` is needed with more than one cell; `probe` sees every core at every sample,
    each `sample_every_s` (0: never)."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        seed: int = 0,
        route: Route | None = None,
        sample_every_s: float = 0.0,
        probe: Probe | None = None,
    ) -> None:
        if cluster.cells > 1 and route is None:
            raise ValueError("with more than one cell, somebody must say which a request goes to")
        self._seed = seed
        self._route = route
        self._clients = Clients(cluster.replicas[0].model.fingerprint)
        self._vocab_size = cluster.replicas[0].vocab_size
        self.cells = [
            Cell(
                cluster.config,
                cluster.replicas[number :: cluster.cells],
                self._clients.take,
                strategy=cluster.strategy,
                link_s=cluster.link_s,
                seed=seed + number,
            )
            for number in range(cluster.cells)
        ]
        for cell in self.cells:
            for prefix in cluster.pinned:
                cell.pin(prefix)
        self._timelines = [Timeline(cell, sample_every_s, probe) for cell in self.cells]

    def run(self, jobs: Sequence[Job], horizon_s: float = float("inf")) -> Outcome:
        """Until all jobs are done, or `horizon_s` has come. Raises `SimulationError` if it cannot go on."""
        arrivals = deque(sorted(enumerate(jobs), key=lambda each: each[1].arrival_s))
        while (begin := self._next_at(arrivals)) < horizon_s:
            end = min(begin // _WINDOW_S * _WINDOW_S + _WINDOW_S, horizon_s)
            while arrivals and arrivals[0][1].arrival_s < end:
                self._send(*arrivals.popleft())
            for timeline in self._timelines:
                timeline.run(end)
        is_over = not arrivals and all(cell.is_idle for cell in self.cells)
        return self._outcome(max(each.moved_at for each in self._timelines) if is_over else horizon_s)

    def _next_at(self, arrivals: Sequence[tuple[int, Job]]) -> float:
        first = min(timeline.next_at for timeline in self._timelines)
        return min(first, arrivals[0][1].arrival_s) if arrivals else first

    def _send(self, index: int, job: Job) -> None:
        """What frontends know of cells when they choose one is of the last full second."""
        request = self._clients.ask(index, job, prompt_token_ids(job, index, self._vocab_size, self._seed))
        number = self._route(request, job.arrival_s, self.cells) if self._route is not None else 0
        self._timelines[number].expect(request, job.arrival_s)

    def _outcome(self, seconds: float) -> Outcome:
        for timeline in self._timelines:
            timeline.finish(seconds)
        devices = [device for cell in self.cells for device in cell.devices.values()]
        busy_s = sum(device.busy_s for device in devices)
        return Outcome(
            served=self._clients.served,
            gaps=self._clients.gaps,
            seconds=seconds,
            steps=sum(timeline.steps for timeline in self._timelines),
            busy_share=busy_s / (seconds * len(devices)) if seconds else 0.0,
            preemptions=sum(cell.core.preemptions for cell in self.cells),
            swaps=sum(cell.core.swaps for cell in self.cells),
            samples=[Sample.total(shares) for shares in zip(*(each.samples for each in self._timelines), strict=True)],
        )
