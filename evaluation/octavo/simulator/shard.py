"""Runs some of a cluster's cells from window to window, in this process or in one of their own."""

import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from octavo.runtime.process.gc_tuning import collect_seldom
from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.step.policies import StepPolicy
from octavo.scheduler.kv.manager import paged_memory
from octavo.scheduler.kv.memory import MakeMemory
from octavo.simulator.cell import Cell, SimulationError
from octavo.simulator.clients import Clients
from octavo.simulator.device import ReplicaSpec
from octavo.simulator.timeline import Probe, Sample, Timeline
from octavo.wire.requests import Prefix, Request
from octavo.workload.gaps import Gaps
from octavo.workload.job import Job
from octavo.workload.served import Served


@dataclass(frozen=True)
class Cluster:
    """Describes what is simulated: `cells` schedulers, to which `replicas` are dealt out. All keep the `pinned`
    prefixes. Raises `ValueError` if a cell would have no replica."""

    config: SchedulerConfig
    replicas: Sequence[ReplicaSpec]
    cells: int = 1
    make_memory: MakeMemory = paged_memory
    # None: the one that `config` names.
    policy: StepPolicy | None = None
    # Seconds of a message from scheduler to worker, or back.
    link_s: float = 0.0
    pinned: Sequence[Prefix] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.cells <= len(self.replicas):
            raise ValueError(f"{len(self.replicas)} replicas cannot be dealt out to {self.cells} cells")


@dataclass(frozen=True, slots=True)
class Arrival:
    """Routes job number `index` of the workload to a cell."""

    cell: int
    index: int
    job: Job
    request: Request


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


class Shard:
    """Runs the cells of these `numbers`. Raises `SimulationError` if a cell cannot be simulated."""

    def __init__(
        self, cluster: Cluster, numbers: Sequence[int], *, seed: int, sample_every_s: float, probe: Probe | None
    ) -> None:
        self._timelines: dict[int, Timeline] = {}
        self._clients: dict[int, Clients] = {}
        for number in numbers:
            clients = self._clients[number] = Clients()
            cell = Cell(
                cluster.config,
                cluster.replicas[number :: cluster.cells],
                clients.take,
                make_memory=cluster.make_memory,
                policy=cluster.policy,
                link_s=cluster.link_s,
                seed=seed + number,
            )
            for prefix in cluster.pinned:
                cell.pin(prefix)
            self._timelines[number] = Timeline(cell, sample_every_s, probe)

    @property
    def cells(self) -> list[Cell]:
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
            self._clients[arrival.cell].expect(arrival.index, arrival.job)
            self._timelines[arrival.cell].expect(arrival.request, arrival.job.arrival_s)
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
            busy_s=sum(device.busy_s for device in cell.devices.values()),
            preemptions=cell.core.preemptions,
            swaps=cell.core.swaps,
            samples=timeline.samples,
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
