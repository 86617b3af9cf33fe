"""Time goes from event to event: requests come, steps end, cells plan."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.strategy import Strategy
from octavo.simulator.cell import Cell, SimulationError
from octavo.simulator.clients import Clients
from octavo.simulator.device import ReplicaSpec
from octavo.wire.requests import Prefix, Request
from octavo.workload.job import Job
from octavo.workload.measures import Gaps, Served
from octavo.workload.tokens import prompt_token_ids

# A shell looks at its core so often even if nothing happens: for what waits for time alone, and for the second step in
# flight. It is given up after so long without any step.
_TICK_S = 0.1
_STALLED_S = 600.0

# Which cell a request goes to that comes at this time.
Route = Callable[[Request, float, Sequence[Cell]], int]
Probe = Callable[[float, Scheduler], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """A moment: requests that wait, run or are swapped out, sequences that run, and blocks, of all cells together."""

    time: float
    waiting: int
    running: int
    swapped: int
    sequences: int
    blocks_used: int
    blocks_cached: int
    blocks: int


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
        self._sample_every_s = sample_every_s
        self._probe = probe
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
        self._now = 0.0
        self._steps = 0
        self._samples: list[Sample] = []
        # When, in which order, where, and on which replica a step ends; 0: nothing ends, time to look again, as is
        # foreseen for the cells of `_ticking`.
        self._events: list[tuple[float, int, int, int]] = []
        self._ticking: set[int] = set()
        self._num_events = 0

    def run(self, jobs: Sequence[Job], horizon_s: float = float("inf")) -> Outcome:
        """Until all jobs are done, or `horizon_s` has come. Raises `SimulationError` if it cannot go on."""
        arrivals = sorted(range(len(jobs)), key=lambda index: jobs[index].arrival_s)
        arrived, moved_at, next_sample = 0, 0.0, 0.0
        while arrived < len(arrivals) or self._events:
            next_arrival = jobs[arrivals[arrived]].arrival_s if arrived < len(arrivals) else float("inf")
            next_event = self._events[0][0] if self._events else float("inf")
            now = self._now = min(next_arrival, next_event)
            if now > horizon_s:
                self._now = horizon_s
                return self._outcome()
            if self._sample_every_s:
                while next_sample <= now:
                    self._sample(next_sample)
                    next_sample += self._sample_every_s
            touched: set[int] = set()
            while arrived < len(arrivals) and jobs[arrivals[arrived]].arrival_s <= now:
                touched.add(self._arrive(arrivals[arrived], jobs[arrivals[arrived]]))
                arrived, moved_at = arrived + 1, now
            while self._events and self._events[0][0] <= now:
                _, _, number, incarnation = heapq.heappop(self._events)
                if incarnation:
                    self.cells[number].answer(incarnation, now)
                    self._steps += 1
                    moved_at = now
                else:
                    self._ticking.discard(number)
                touched.add(number)
            for number in sorted(touched):
                self._plan(number)
            if now - moved_at > _STALLED_S and arrived == len(arrivals):
                raise SimulationError(f"nothing has been computed for {_STALLED_S:g} s, though requests wait")
        self._now = moved_at
        return self._outcome()

    def _arrive(self, index: int, job: Job) -> int:
        prompt = prompt_token_ids(job, index, self._vocab_size, self._seed)
        request = self._clients.ask(index, job, prompt)
        number = self._route(request, self._now, self.cells) if self._route is not None else 0
        self.cells[number].submit(request, self._now)
        return number

    def _plan(self, number: int) -> None:
        cell = self.cells[number]
        for pending in cell.plan(self._now):
            self._push(pending.time, number, pending.incarnation)
        if not cell.is_idle and number not in self._ticking:
            self._ticking.add(number)
            self._push(self._now + _TICK_S, number, 0)

    def _push(self, time: float, number: int, incarnation: int) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, number, incarnation))

    def _sample(self, time: float) -> None:
        cores = [cell.core for cell in self.cells]
        replicas = [replica for core in cores for replica in core.replicas.values()]
        self._samples.append(
            Sample(
                time,
                sum(len(core.waiting) for core in cores),
                sum(len(replica.running) for replica in replicas),
                sum(len(replica.swapped) for replica in replicas),
                sum(replica.num_running_seqs for replica in replicas),
                sum(replica.kv.num_blocks - replica.kv.num_free for replica in replicas),
                sum(replica.kv.num_cached for replica in replicas),
                sum(replica.kv.num_blocks for replica in replicas),
            )
        )
        if self._probe is not None:
            for core in cores:
                self._probe(time, core)

    def _outcome(self) -> Outcome:
        devices = [device for cell in self.cells for device in cell.devices.values()]
        busy_s = sum(device.busy_s for device in devices)
        return Outcome(
            served=self._clients.served,
            gaps=self._clients.gaps,
            seconds=self._now,
            steps=self._steps,
            busy_share=busy_s / (self._now * len(devices)) if self._now else 0.0,
            preemptions=sum(cell.core.preemptions for cell in self.cells),
            swaps=sum(cell.core.swaps for cell in self.cells),
            samples=self._samples,
        )
