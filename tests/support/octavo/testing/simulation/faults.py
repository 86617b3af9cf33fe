"""All that goes wrong. Each fault chooses its victim and how bad it is, and ends by itself."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.scheduler.core.events import CacheReset, WorkerCordoned, WorkerDrained, WorkerReadmitted
from octavo.testing.simulation.clock import Process
from octavo.testing.simulation.links import Direction, Link, Noise, silence

if TYPE_CHECKING:
    from octavo.testing.simulation.processes.worker import WorkerProcess
    from octavo.testing.simulation.simulation import Simulation

Fault = Callable[["Simulation"], None]


def kill_worker(simulation: "Simulation") -> None:
    if worker := _worker(simulation):
        simulation.supervisor.kill_worker(worker)


def terminate_worker(simulation: "Simulation") -> None:
    """Asks a worker to end, as an operator or a scheduler of containers does; and perhaps asks again, impatiently."""
    if worker := _worker(simulation):
        worker.terminate()
        if simulation.random.random() < 0.4:
            seconds = simulation.random.uniform(0.0, 1.0)
            simulation.recover_after(seconds, lambda: worker.run_at(simulation.clock.now, worker.terminate))


def upgrade_worker(simulation: "Simulation") -> None:
    """Another release comes, which this scheduler cannot talk to; and after that another like the first."""
    if worker := _worker(simulation):
        simulation.supervisor.upgrading.add(worker.name)
        worker.terminate()


def drain_worker(simulation: "Simulation") -> None:
    """An operator lets a worker end once it holds nothing; or thinks better of it."""
    place, scheduler = simulation.random.choice(sorted(simulation.hardware)), simulation.scheduler
    grace_s = simulation.random.choice((None, 0.0, 0.3, 2.0))
    scheduler.run_at(simulation.clock.now, lambda: scheduler.shell.handle(WorkerDrained(place, grace_s)))
    if simulation.random.random() < 0.3:
        simulation.recover_after(simulation.random.uniform(0.05, 2.0), lambda: _readmit(simulation, place))


def cordon_worker(simulation: "Simulation") -> None:
    """An operator lets a worker get nothing new for a while, whatever becomes of its process."""
    place, scheduler = simulation.random.choice(sorted(simulation.hardware)), simulation.scheduler
    scheduler.run_at(simulation.clock.now, lambda: scheduler.shell.handle(WorkerCordoned(place)))
    simulation.recover_after(simulation.random.uniform(0.3, 6.0), lambda: _readmit(simulation, place))


def _readmit(simulation: "Simulation", place: str) -> None:
    # Of a scheduler that is dead the next knows nothing of this.
    scheduler = simulation.scheduler
    scheduler.run_at(simulation.clock.now, lambda: scheduler.shell.handle(WorkerReadmitted(place)))


def hang_worker(simulation: "Simulation") -> None:
    """Makes a worker stand still in the middle of whatever it does, while its connection lives; until its supervisor
    kills it."""
    if worker := _worker(simulation):
        seconds = simulation.random.uniform(2.0, 12.0)
        worker.stall(2 * seconds)
        simulation.recover_after(seconds, lambda: simulation.supervisor.kill_worker(worker))


def kill_scheduler(simulation: "Simulation") -> None:
    if simulation.scheduler.alive:
        simulation.scheduler.kill()
        longest = simulation.random.choice((0.5, 3.0, 12.0))
        simulation.recover_after(simulation.random.uniform(0.02, longest), simulation.supervisor.start_scheduler)


def kill_frontend(simulation: "Simulation") -> None:
    simulation.supervisor.kill_frontend(simulation.random.choice(sorted(simulation.frontends)))


def upgrade_frontend(simulation: "Simulation") -> None:
    """Another release comes, which this scheduler cannot talk to; and after that another like the first."""
    place = simulation.random.choice(sorted(simulation.frontends))
    simulation.supervisor.upgrading.add(place)
    simulation.supervisor.kill_frontend(place)


def pause(simulation: "Simulation") -> None:
    """A process stands still, or two of them do; if all of a process does, its connections die."""
    processes = _processes(simulation)
    for process in simulation.random.sample(processes, min(len(processes), simulation.random.choice((1, 1, 2)))):
        _pause(simulation, process)


def cut(simulation: "Simulation") -> None:
    """A link carries nothing, in one direction or both; it is torn if that lasts."""
    place, link = _link(simulation)
    seconds = simulation.random.uniform(0.1, simulation.random.choice((2.0, 12.0)))
    for direction in _some_directions(simulation, link):
        direction.cut(seconds)
    simulation.recover_after(seconds, lambda: None)
    patience = silence(simulation.random)
    if seconds > patience:
        simulation.clock.after(patience, lambda: simulation.dealers[place].reset())


def reset(simulation: "Simulation") -> None:
    """A connection breaks, with all that is on its way; or all of them do."""
    places = sorted(simulation.dealers)
    for place in simulation.random.choice((places, [simulation.random.choice(places)])):
        simulation.dealers[place].reset()


def slow_link(simulation: "Simulation") -> None:
    """Messages take long, but keep their order."""
    _, link = _link(simulation)
    for direction in _some_directions(simulation, link):
        direction.delay = simulation.random.uniform(0.05, 5.0)
        simulation.recover_after(simulation.random.uniform(0.5, 5.0), direction.calm_down)


def noise(simulation: "Simulation") -> None:
    """Single messages are lost, doubled, or overtaken by later ones, as never on TCP."""
    _, link = _link(simulation)
    link.was_noisy = True
    for direction in _some_directions(simulation, link):
        direction.noise = Noise(*(simulation.random.choice((0.0, 0.03, 0.3)) for _ in range(3)))
        simulation.recover_after(simulation.random.uniform(0.5, 5.0), direction.calm_down)


def fail_steps(simulation: "Simulation") -> None:
    device = simulation.devices[simulation.random.choice(sorted(simulation.devices))]
    device.failure_rate = simulation.random.uniform(0.05, 0.8)
    simulation.recover_after(simulation.random.uniform(0.1, 3.0), device.recover)


def spoil_sequences(simulation: "Simulation") -> None:
    """Makes a device compute values of single sequences that are not finite."""
    device = simulation.devices[simulation.random.choice(sorted(simulation.devices))]
    device.nan_rate = simulation.random.uniform(0.1, 0.9)
    simulation.recover_after(simulation.random.uniform(0.1, 3.0), device.recover)


def break_device(simulation: "Simulation") -> None:
    """Makes a device compute nothing finite."""
    device = simulation.devices[simulation.random.choice(sorted(simulation.devices))]
    device.is_broken = True
    simulation.recover_after(simulation.random.uniform(0.05, 4.0), device.recover)


def shrink_memory(simulation: "Simulation") -> None:
    """A device has memory for a few sequences at once."""
    device = simulation.devices[simulation.random.choice(sorted(simulation.devices))]
    device.most_sequences = simulation.random.choice((0, 1, 2, 4))
    simulation.watch.harm.least_memory = min(simulation.watch.harm.least_memory, device.most_sequences)
    simulation.recover_after(simulation.random.uniform(0.1, 3.0), device.recover)


def slow_worker(simulation: "Simulation") -> None:
    device = simulation.devices[simulation.random.choice(sorted(simulation.devices))]
    device.step_s = simulation.random.choice((0.2, 0.5, 1.5, 5.0))
    simulation.recover_after(simulation.random.uniform(0.5, 4.0), device.recover)


def repin(simulation: "Simulation") -> None:
    """An operator unpins a prefix; later the frontends' word, or the operator, brings it back."""
    name = simulation.random.choice(sorted(simulation.scenario.prefixes) or [""])
    scheduler = simulation.scheduler
    scheduler.run_at(simulation.clock.now, lambda: scheduler.unpin(name))
    seconds = simulation.random.uniform(0.01, 3.0)
    simulation.recover_after(seconds, lambda: simulation.scheduler.pin(simulation.scenario.prefixes, name))


def reset_cache(simulation: "Simulation") -> None:
    """An operator wants nothing to be found again that is cached."""
    scheduler = simulation.scheduler
    scheduler.run_at(simulation.clock.now, lambda: scheduler.shell.handle(CacheReset(None)))


def _pause(simulation: "Simulation", process: Process) -> None:
    seconds = simulation.random.uniform(0.2, simulation.random.choice((3.0, 20.0)))
    process.stall(seconds)
    simulation.recover_after(seconds, process.wake)
    patience = silence(simulation.random)
    if seconds > patience and simulation.random.random() < 0.5:
        for dealer in simulation.dealers_of(process):
            simulation.clock.after(patience, dealer.reset)


def _processes(simulation: "Simulation") -> list[Process]:
    processes = [simulation.scheduler, *simulation.workers.values(), *simulation.frontends.values()]
    return [process for process in processes if process.alive]


def _link(simulation: "Simulation") -> tuple[str, Link]:
    return simulation.random.choice(sorted(simulation.network.links.items(), key=lambda item: item[0]))


def _some_directions(simulation: "Simulation", link: Link) -> list[Direction]:
    return simulation.random.sample(link.directions, simulation.random.choice((1, 2)))


def _worker(simulation: "Simulation") -> "WorkerProcess | None":
    """One that lives, if the one at the place that is struck does."""
    worker = simulation.workers.get(simulation.random.choice(sorted(simulation.hardware)))
    return worker if worker and worker.alive else None


# Those that lose nothing and fail nobody.
GENTLE: list[Fault] = [terminate_worker, upgrade_worker, drain_worker, cordon_worker, repin, reset_cache]
FAULTS: list[Fault] = [
    *GENTLE,
    kill_worker,
    hang_worker,
    kill_scheduler,
    kill_frontend,
    upgrade_frontend,
    pause,
    cut,
    reset,
    slow_link,
    noise,
    fail_steps,
    spoil_sequences,
    break_device,
    shrink_memory,
    slow_worker,
]
