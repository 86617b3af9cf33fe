"""One run: the scenario of a seed from its first message until nothing is held for anybody."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

from octavo.runtime.models.directory import fingerprint
from octavo.testing.simulation.clock import Action, Clock, Process
from octavo.testing.simulation.crowd import Crowd
from octavo.testing.simulation.device import Device
from octavo.testing.simulation.disk import SimulatedDisk
from octavo.testing.simulation.faults import Fault
from octavo.testing.simulation.network import Dealer, Network
from octavo.testing.simulation.peers import SimulatedExchange
from octavo.testing.simulation.processes.frontend import FrontendProcess
from octavo.testing.simulation.processes.scheduler import SchedulerProcess
from octavo.testing.simulation.processes.supervisor import Supervisor
from octavo.testing.simulation.processes.worker import WorkerProcess
from octavo.testing.simulation.scenario import Scenario, draw
from octavo.testing.simulation.trace import Trace
from octavo.testing.simulation.watch import Watch

# After the last fault everything must be done within this time, and a while later nothing may be held.
_LIVENESS_S = 90.0
_SETTLED_S = 15.0
# Hundreds of times what a run takes.
_MAX_EVENTS = 1_000_000
# What only a fault can bring about; and what not even an operator can, who has patience.
_REPAIRS = {"resubmissions", "replicas lost", "frontends lost", "steps failed", "steps skipped"}
_LOSSES = {"resubmissions", "replicas lost", "told: worker_lost"}
_ACCIDENTS = {"frontends lost", "steps failed", "replicas lost: overdue", "replicas lost: confused"}


class Simulation:
    """Runs the scenario of a seed; one object runs once."""

    def __init__(self, seed: int, directory: Path, *, hashing: bool = False) -> None:
        self.scenario: Scenario = draw(seed, directory)
        self.random = Random(f"{seed}: what happens")
        self.clock = Clock()
        self.trace = Trace(hashing=hashing)
        self.network = Network(self.clock, self.random, self.trace, Counter())
        self.watch = Watch(self.network, is_calm=self.scenario.is_calm)
        # What is there now, by place.
        self.scheduler: SchedulerProcess
        self.workers: dict[str, WorkerProcess] = {}
        self.frontends: dict[str, FrontendProcess] = {}
        self.hardware = {f"worker-{index}": hardware for index, hardware in enumerate(self.scenario.workers)}
        self.devices = {
            place: Device(self.scenario.step_s * hardware.slowness, hardware.most_sequences, self.scenario.poisons)
            for place, hardware in self.hardware.items()
        }
        plan = self.scenario.disk
        self.disk = SimulatedDisk(plan, Random(f"reads {seed}")) if plan is not None else None
        self.exchanges: dict[str, SimulatedExchange] | None = {} if self.scenario.moves else None
        self.fingerprint = fingerprint(directory)
        self.crowd = Crowd(self)
        self.supervisor = Supervisor(self)
        self._troubled_until = 0.0
        self._num_events = 0

    @property
    def dealers(self) -> dict[str, Dealer]:
        """The ends of all links but the scheduler's, by place."""
        workers = {place: worker.dealer for place, worker in self.workers.items()}
        return workers | {place: frontend.dealer for place, frontend in self.frontends.items()}

    def dealers_of(self, process: Process) -> list[Dealer]:
        """The other ends of all connections of a process, or its own."""
        return [dealer for place, dealer in self.dealers.items() if process.name in (place, self.scheduler.name)]

    # -- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises whatever shows a fault of the code that is simulated."""
        self._begin()
        self._run_until(lambda: self.crowd.num_open == 0 and self.clock.now >= self._troubled_until, _LIVENESS_S)
        self._troubled_until = self.clock.now
        self._run_until(self._is_quiet, _SETTLED_S)
        self.scheduler.count()
        self._check_rest()

    def _begin(self) -> None:
        self.supervisor.start_scheduler()
        for place, hardware in self.hardware.items():
            self.clock.at(hardware.joins_at, partial(self.supervisor.start_worker, place))
        for index in range(self.scenario.num_frontends):
            self.supervisor.start_frontend(f"frontend-{index}")
        for plan in self.scenario.clients:
            self.clock.at(plan.at, partial(self.crowd.come, plan))
        for time, fault in self.scenario.faults:
            self._troubled_until = max(self._troubled_until, time)
            self.clock.at(time, partial(self._strike, fault))

    def _run_until(self, reached: Callable[[], bool], patience_s: float) -> None:
        while not reached():
            self._num_events += 1
            assert self._num_events <= _MAX_EVENTS, "there is no end to it"
            assert self.clock.now <= self._troubled_until + patience_s, f"not done in time: {self._unfinished()}"
            self.clock.step()

    def _unfinished(self) -> str:
        core = self.scheduler.core
        waiting = [client.plan.request_id for frontend in self.frontends.values() for client in frontend.clients]
        held = [(group.request_id, group.status.name) for group in core.groups]
        return f"{self.crowd.num_open} clients to serve, of which {waiting} wait; the scheduler holds {held}"

    def note(self, where: str, what: str) -> None:
        """Writes something into the trace."""
        self.trace.note(self.clock.now, where, what)

    # -- faults -----------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        name = fault.__name__
        self.note("fault", name)
        self.watch.counts[f"fault: {name}"] += 1
        fault(self)

    def recover_after(self, seconds: float, action: Action) -> None:
        """Ends a fault `seconds` from now."""
        self._troubled_until = max(self._troubled_until, self.clock.now + seconds)
        self.clock.after(seconds, action)

    # -- what must be true ------------------------------------------------------------------------------------------

    def _is_quiet(self) -> bool:
        """Tells whether all are registered, and nothing is held for anybody."""
        core = self.scheduler.core
        return (
            not core.groups
            and core.replicas.keys() == {worker.protocol.incarnation for worker in self.workers.values()}
            and core.num_frontends == len(self.frontends)
            and not any(
                replica.running or replica.outstanding or replica.prefixes.to_compute
                for replica in core.replicas.values()
            )
        )

    def _check_rest(self) -> None:
        """All blocks are free but for pins, and the workers have forgotten all, or will with the next plan."""
        core = self.scheduler.core
        core.check()
        self.watch.rest(core)
        assert not core.waiting.tenants, "an account is kept for nobody"
        for worker in self.workers.values():
            replica = core.replicas[worker.protocol.incarnation]
            kept = {sequence.sequence_id for sequence in worker.protocol._table}
            assert kept <= set(replica.next_plan.forget), "the worker is never told to forget a sequence"
        if self.scenario.is_calm:
            self._check_none(_REPAIRS)
        if self.scenario.is_gentle:
            self._check_none(_ACCIDENTS if self.watch.counts["workers left"] else _ACCIDENTS | _LOSSES)

    def _check_none(self, names: set[str]) -> None:
        """Checks that nothing was repaired where nothing went wrong."""
        found = {name: count for name, count in self.watch.counts.items() if name in names and count}
        assert not found, f"with no fault there were {found}"
