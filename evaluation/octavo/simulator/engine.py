"""Simulates a cluster: takes jobs and returns what became of them. Its cells run from window to window, in this process
or in others."""

import signal
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from octavo.runtime.process.gc_tuning import collect_seldom
from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.step.policies import StepPolicy
from octavo.scheduler.kv.manager import paged_memory
from octavo.scheduler.kv.memory import MakeMemory
from octavo.simulator.cell import (
    Clients,
    Copied,
    Due,
    Probe,
    Restart,
    Sample,
    SimulatedCell,
    SimulationError,
    Timeline,
    ask,
)
from octavo.simulator.device import ReplicaSpec
from octavo.simulator.speculation import Acceptance
from octavo.wire.requests import Prefix, Request
from octavo.workload.guesses import Guesses
from octavo.workload.job import Job, prompt_token_ids
from octavo.workload.measures import Gaps, Served

# -- cells ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """Describes what is simulated: `cells` schedulers, to which `replicas` are dealt out. All keep the `pinned`
    prefixes, and of each the first replica has the `restarts`. Raises `ValueError` if a cell would have no replica."""

    config: SchedulerConfig
    replicas: Sequence[ReplicaSpec]
    cells: int = 1
    make_memory: MakeMemory = paged_memory
    # None: the one that `config` names.
    policy: StepPolicy | None = None
    # Seconds of a message from scheduler to worker, or back.
    link_s: float = 0.0
    pinned: Sequence[Prefix] = ()
    # Of guesses for jobs without a transcript; None: there are none.
    acceptance: Acceptance | None = None
    restarts: Sequence[Restart] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.cells <= len(self.replicas):
            raise ValueError(f"{len(self.replicas)} replicas cannot be dealt out to {self.cells} cells")


@dataclass(frozen=True, slots=True)
class Arrival:
    """Routes job number `index` of the workload to a cell, with the `later` turns of its conversation."""

    cell: int
    index: int
    job: Job
    request: Request
    later: Sequence[tuple[int, Job]] = ()


@dataclass(frozen=True, slots=True)
class Standing:
    """Describes a cell between two windows: when something happens to it next (infinite: nothing does), when something
    happened last, and the tokens that it still has to compute, as its scheduler reports to frontends."""

    next_at: float
    moved_at: float
    is_idle: bool
    num_replicas: int
    work_tokens: int


@dataclass(frozen=True)
class CellOutcome:
    """Holds the results of a cell's simulation; `served` has the number of each job in the workload."""

    served: list[tuple[int, Served]]
    gaps: Gaps
    steps: int
    busy_s: float
    preemptions: int
    swaps: int
    samples: list[Sample]
    turns: int
    guesses: Guesses
    found: dict[str, int]
    copied: Copied


class Shard:
    """Runs the cells of these `numbers`. Raises `SimulationError` if a cell cannot be simulated."""

    def __init__(
        self, cluster: Cluster, numbers: Sequence[int], *, seed: int, sample_every_s: float, probe: Probe | None
    ) -> None:
        self._timelines: dict[int, Timeline] = {}
        self._clients: dict[int, Clients] = {}
        self._model, self._seed = cluster.replicas[0], seed
        for number in numbers:
            clients = self._clients[number] = Clients()
            cell = SimulatedCell(
                cluster.config,
                cluster.replicas[number :: cluster.cells],
                clients.take,
                make_memory=cluster.make_memory,
                policy=cluster.policy,
                link_s=cluster.link_s,
                acceptance=cluster.acceptance,
                seed=seed + number,
            )
            for prefix in cluster.pinned:
                cell.pin(prefix)
            self._timelines[number] = Timeline(
                cell,
                sample_every_s,
                probe,
                take_due=clients.take_due,
                speak=partial(self._speak, clients),
                restarts=cluster.restarts,
            )

    def _speak(self, clients: Clients, due: Due) -> Request:
        """Makes the request of a later turn, which comes now."""
        prompt = prompt_token_ids(due.job, due.index, self._model.vocab_size, self._seed, due.said)
        clients.expect(due.index, due.job, prompt)
        return ask(due.index, due.job, prompt, self._model.model.fingerprint)

    @property
    def cells(self) -> list[SimulatedCell]:
        return [timeline.cell for timeline in self._timelines.values()]

    def standings(self) -> list[Standing]:
        """Returns the standing of each cell, in the order of the cells."""
        return [
            Standing(each.next_at, each.moved_at, each.cell.is_idle, each.cell.num_replicas, each.cell.work_tokens)
            for each in self._timelines.values()
        ]

    def run(self, arrivals: Sequence[Arrival], until: float) -> list[Standing]:
        """Runs everything that happens before then, with what comes meanwhile, in its order. Raises `SimulationError`
        if a cell cannot go on."""
        for arrival in arrivals:
            clients = self._clients[arrival.cell]
            clients.expect(arrival.index, arrival.job, arrival.request.prompt_token_ids)
            for index, job in arrival.later:
                clients.hold(index, job)
            self._timelines[arrival.cell].expect(arrival.request, arrival.job)
        for timeline in self._timelines.values():
            timeline.run(until)
        return self.standings()

    def finish(self, end: float) -> list[CellOutcome]:
        """Returns all that happened until the end of the simulation, in the order of the cells."""
        return [self._outcome(number, timeline, end) for number, timeline in self._timelines.items()]

    def _outcome(self, number: int, timeline: Timeline, end: float) -> CellOutcome:
        timeline.finish(end)
        cell, clients = timeline.cell, self._clients[number]
        return CellOutcome(
            served=clients.served,
            gaps=clients.gaps,
            steps=timeline.steps,
            busy_s=cell.busy_s,
            preemptions=cell.core.preemptions,
            swaps=cell.core.swaps,
            samples=timeline.samples,
            turns=cell.turns,
            guesses=cell.guesses,
            found=cell.found,
            copied=cell.copied,
        )


class ShardProcess:
    """Computes a window while this process does something else: `begin_run` and then `end_run`. Raises
    `SimulationError` like a `Shard`, and if the process ends."""

    def __init__(self, cluster: Cluster, numbers: Sequence[int], *, seed: int, sample_every_s: float) -> None:
        # Spawned: a fork would inherit threads and whatever else is there.
        context = get_context("spawn")
        self._connection, its_end = context.Pipe()
        arguments = (its_end, cluster, list(numbers), seed, sample_every_s)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        its_end.close()

    def end_start(self) -> list[Standing]:
        """Waits until the cells are there."""
        standings: list[Standing] = self._receive()
        return standings

    def begin_run(self, arrivals: Sequence[Arrival], until: float) -> None:
        self._send((arrivals, until))

    def end_run(self) -> list[Standing]:
        standings: list[Standing] = self._receive()
        return standings

    def finish(self, end: float) -> list[CellOutcome]:
        """Asks for the outcomes, which is the last question; the process ends."""
        self._send(end)
        outcomes: list[CellOutcome] = self._receive()
        self.close()
        return outcomes

    def close(self) -> None:
        """Ends the process, whatever it does."""
        self._connection.close()
        self.process.terminate()
        self.process.join()

    def _send(self, message: object) -> None:
        # Why it is not there is what it said last, if anything.
        with suppress(OSError):
            self._connection.send(message)

    def _receive(self) -> Any:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            self.process.join()
            raise SimulationError(
                f"a process of the simulation has ended (exit status {self.process.exitcode}): is there memory enough?"
            ) from error
        if isinstance(answer, SimulationError):
            raise answer
        return answer


def _serve(connection: Connection, cluster: Cluster, numbers: Sequence[int], seed: int, sample_every_s: float) -> None:
    # Ctrl-C is meant for the process that asks, which ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    collect_seldom()
    try:
        shard = Shard(cluster, numbers, seed=seed, sample_every_s=sample_every_s, probe=None)
        connection.send(shard.standings())
        while isinstance(message := connection.recv(), tuple):
            connection.send(shard.run(*message))
        connection.send(shard.finish(message))
    except SimulationError as error:
        connection.send(error)
    except (EOFError, OSError):
        # Nobody asks any more.
        return


# -- clusters ---------------------------------------------------------------------------------------------------------


# SchedulerPool know nothing of each other within a second; so each goes through it alone, which is kinder to the CPU's
# caches, and lets several processes share them.
_WINDOW_S = 1.0

_Each = TypeVar("_Each")

# Which cell a request goes to that comes at this time.
Route = Callable[[Request, float, Sequence[Standing]], int]


@dataclass
class SimulationOutcome:
    """Holds the results of a simulation, jobs in the order of arrival. `busy_share` is the share of the replicas' time
    in which they computed. Sequences chose in `turns` steps all together, each counted once for each of them; of
    `guesses` is what speculation checked there. Of prompts so many tokens were `found` computed, by tier. `copied` is
    what replicas have copied of each other."""

    served: list[Served]
    gaps: Gaps
    seconds: float
    steps: int
    busy_share: float
    preemptions: int
    swaps: int
    samples: list[Sample] = field(default_factory=list)
    turns: int = 0
    guesses: Guesses = field(default_factory=Guesses)
    found: dict[str, int] = field(default_factory=dict)
    copied: Copied = field(default_factory=Copied)


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
        self._later: defaultdict[str, list[tuple[int, Job]]] = defaultdict(list)
        self._here = Shard(cluster, numbers, seed=seed, sample_every_s=sample_every_s, probe=probe)

    @property
    def cells(self) -> list[SimulatedCell]:
        """Returns the cells that this process simulates itself."""
        return self._here.cells

    def run(
        self, jobs: Sequence[Job], horizon_s: float = float("inf"), passed: Callable[[float], None] | None = None
    ) -> SimulationOutcome:
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
    ) -> SimulationOutcome:
        self._later = defaultdict(list)
        for index, job in enumerate(jobs):
            if job.turn > 1:
                self._later[job.conversation].append((index, job))
        first = ((index, job) for index, job in enumerate(jobs) if job.turn <= 1)
        arrivals = deque(sorted(first, key=lambda each: each[1].arrival_s))
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
        second. Later turns of a conversation go where its first went: their beginnings are there."""
        model = self._cluster.replicas[0]
        prompt = prompt_token_ids(job, index, model.vocab_size, self._seed)
        request = ask(index, job, prompt, model.model.fingerprint)
        cell = self._route(request, job.arrival_s, standings) if self._route is not None else 0
        return Arrival(cell, index, job, request, self._later.pop(job.conversation, []) if job.turn else [])

    def _outcome(self, cells: Sequence[CellOutcome], seconds: float) -> SimulationOutcome:
        served = [each for cell in cells for each in cell.served]
        served.sort(key=lambda each: (each[1].job.arrival_s, each[0]))
        gaps, guesses, found, copied = Gaps(), Guesses(), Counter[str](), Copied()
        for cell in cells:
            copied.merge(cell.copied)
            found.update(cell.found)
            gaps.merge(cell.gaps)
            guesses.merge(cell.guesses)
        replica_s = seconds * len(self._cluster.replicas)
        return SimulationOutcome(
            served=[each for _, each in served],
            gaps=gaps,
            seconds=seconds,
            steps=sum(cell.steps for cell in cells),
            busy_share=sum(cell.busy_s for cell in cells) / replica_s if replica_s else 0.0,
            preemptions=sum(cell.preemptions for cell in cells),
            swaps=sum(cell.swaps for cell in cells),
            samples=[Sample.total(shares) for shares in zip(*(cell.samples for cell in cells), strict=True)],
            turns=sum(cell.turns for cell in cells),
            guesses=guesses,
            found=dict(found),
            copied=copied,
        )


def _next_at(arrivals: Sequence[tuple[int, Job]], standings: Sequence[Standing]) -> float:
    first = min(each.next_at for each in standings)
    return min(first, arrivals[0][1].arrival_s) if arrivals else first


def _interleaved(shares: Sequence[Sequence[_Each]]) -> list[_Each]:
    """Returns what `len(shares)` processes hold for their cells, in the order of all cells, which were dealt out in
    turn."""
    num = sum(map(len, shares))
    return [shares[number % len(shares)][number // len(shares)] for number in range(num)]
