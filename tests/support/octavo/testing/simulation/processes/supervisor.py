"""Starts processes: at the beginning, and again when they have ended."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.frontend.scheduler.session import SchedulerSession
from octavo.testing.fakes.drafters import AdversarialDrafter, Foresight
from octavo.testing.simulation import device
from octavo.testing.simulation.links import silence
from octavo.testing.simulation.network import Dealer
from octavo.testing.simulation.processes.frontend import FrontendProcess, OtherVersionSession
from octavo.testing.simulation.processes.scheduler import SchedulerProcess
from octavo.testing.simulation.processes.worker import OtherVersion, WorkerProcess
from octavo.wire.base import OLDEST_SCHEMA_VERSION, SCHEMA_VERSION
from octavo.wire.steps import Ending, Predecessor
from octavo.worker.protocol import WorkerProtocol

if TYPE_CHECKING:
    from octavo.testing.simulation.simulation import Simulation

# How long a process that hangs stays: its liveness probe fails a few times first.
_HANGS_S = (3.0, 12.0)


class Supervisor:
    """Keeps one process at every place. `upgrading`: places whose next process is of another release."""

    def __init__(self, simulation: "Simulation") -> None:
        self.upgrading: set[str] = set()
        self._simulation = simulation
        # By place: of the last process there that served, for the next.
        self._last_words: dict[str, Predecessor] = {}

    # -- start ------------------------------------------------------------------------------------------------------

    def start_scheduler(self) -> None:
        simulation = self._simulation
        self._note("scheduler", "schedulers")
        epoch = simulation.random.getrandbits(64)
        scenario = simulation.scenario
        foresight = Foresight(scenario.model.vocabulary, scenario.model.window)
        simulation.scheduler = SchedulerProcess(
            simulation.network,
            scenario.config,
            epoch,
            simulation.watch,
            AdversarialDrafter(foresight) if scenario.guesses_wildly else None,
        )

    def start_worker(self, place: str) -> None:
        simulation = self._simulation
        self._note(place, "workers")
        speaks = OtherVersion if self._upgrades(place) else WorkerProtocol
        simulation.workers[place] = WorkerProcess(
            simulation.network,
            place,
            simulation.hardware[place],
            simulation.devices[place],
            simulation.random,
            simulation.watch.harm,
            self._worker_ended,
            speaks,
            self._last_words.get(place),
            simulation.disk,
            simulation.exchanges,
            simulation.scenario.roles[place != "worker-0"],
        )

    def start_frontend(self, place: str) -> None:
        simulation, scenario = self._simulation, self._simulation.scenario
        self._note(place, "frontends")
        frontend_id = simulation.random.getrandbits(63)
        speaks = OtherVersionSession if self._upgrades(place) else SchedulerSession
        session = speaks(frontend_id, simulation.fingerprint, simulation.clock.now, scenario.prefixes)
        simulation.frontends[place] = FrontendProcess(
            simulation.network,
            place,
            session,
            scenario.grace_s,
            simulation.crowd.ended,
            self._frontend_refused,
            loses_aborts=scenario.loses_aborts,
        )

    def _upgrades(self, place: str) -> bool:
        upgrades = place in self.upgrading
        self.upgrading.discard(place)
        return upgrades

    def _note(self, place: str, kind: str) -> None:
        self._simulation.note(place, "starts")
        self._simulation.watch.counts[kind] += 1

    # -- end --------------------------------------------------------------------------------------------------------

    def kill_worker(self, worker: WorkerProcess) -> None:
        """Kills the worker, if it lives; another takes its place."""
        if worker.alive:
            worker.kill()
            # Who has killed it may know, or nobody does.
            hung = worker.protocol.incarnation in self._simulation.watch.harm.poisoned_workers
            known = Ending.UNKNOWN if hung else self._simulation.random.choice((Ending.KILLED, Ending.UNKNOWN))
            self._keep_words(worker, known)
            self._replace(worker, 5.0)

    def kill_frontend(self, place: str) -> None:
        """Kills the frontend; its clients go to the next one."""
        simulation, frontend = self._simulation, self._simulation.frontends[place]
        if frontend.alive:
            frontend.kill()
            self._hang_up(frontend.dealer)
            simulation.crowd.lose(frontend)
            self._start_within(3.0, lambda: self.start_frontend(place))

    def _worker_ended(self, worker: WorkerProcess, ending: device.Ending, why: str) -> None:
        simulation, place = self._simulation, worker.name
        simulation.note(place, f"has ended: {ending.value}")
        simulation.watch.counts[f"workers {ending.value}"] += 1
        if ending in (device.Ending.DIED, device.Ending.HUNG):
            simulation.watch.harm.poisoned_worker(
                worker.protocol.incarnation, hung=ending is device.Ending.HUNG, was_leaving=worker.is_leaving
            )
        match ending:
            case device.Ending.DIED:
                self._keep_words(worker, Ending.CRASHED)
                self._replace(worker, 1.0)
            case device.Ending.HUNG:
                simulation.recover_after(simulation.random.uniform(*_HANGS_S), lambda: self.kill_worker(worker))
            case device.Ending.REFUSED:
                _check_refusal(why, "worker")
                self._replace(worker, 1.0)
            case device.Ending.DISMISSED | device.Ending.LEFT:
                self._last_words.pop(place, None)
                simulation.clock.after(simulation.random.uniform(0.05, 1.0), worker.dealer.reset)
                self._start_within(3.0, lambda: self.start_worker(place))

    def _frontend_refused(self, frontend: FrontendProcess, why: str) -> None:
        self._simulation.watch.counts["frontends refused"] += 1
        _check_refusal(why, "frontend")
        self.kill_frontend(frontend.name)

    def _keep_words(self, worker: WorkerProcess, ending: Ending) -> None:
        """One that was never welcomed leaves those of the one before."""
        if worker.has_served:
            self._last_words[worker.name] = Predecessor(worker.protocol.process, ending, ending.value)

    def _replace(self, worker: WorkerProcess, within_s: float) -> None:
        self._hang_up(worker.dealer)
        self._start_within(within_s, lambda: self.start_worker(worker.name))

    def _start_within(self, seconds: float, start: Callable[[], None]) -> None:
        self._simulation.recover_after(self._simulation.random.uniform(0.05, seconds), start)

    def _hang_up(self, dealer: Dealer) -> None:
        """The connection of a process that died: at once, after all that it had sent, or unnoticed for seconds."""
        random = self._simulation.random
        self._simulation.clock.after(random.choice((0.0, 0.05, silence(random))), dealer.reset)


def _check_refusal(why: str, kind: str) -> None:
    """Nothing but another schema keeps a process out, and both are named; or a device that is broken ends a worker."""
    if kind == "worker" and "nothing finite" in why:
        return
    spoken = f"{OLDEST_SCHEMA_VERSION} to {SCHEMA_VERSION}"
    assert f"the {kind} speaks message schema {SCHEMA_VERSION + 1}, this scheduler {spoken}" in why, why
