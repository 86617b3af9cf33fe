"""All that goes wrong. Each fault chooses its victim and how bad it is, and ends by itself."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.testing.simulation.clock import Process
from octavo.testing.simulation.network import Dealer, Direction, Link, Noise, silence

if TYPE_CHECKING:
    from octavo.testing.simulation.simulation import Simulation

Fault = Callable[["Simulation"], None]


def kill_worker(simulation: "Simulation") -> None:
    place = simulation.random.choice(sorted(simulation.workers))
    worker = simulation.workers[place]
    if worker.alive:
        worker.kill()
        _hang_up(simulation, worker.dealer)
        simulation.recover_after(simulation.random.uniform(0.05, 5.0), lambda: simulation.start_worker(place))


def stop_worker(simulation: "Simulation") -> None:
    """It says goodbye, once it has done its step."""
    place = simulation.random.choice(sorted(simulation.workers))
    worker = simulation.workers[place]

    def leave() -> None:
        worker.leave()
        simulation.clock.after(simulation.random.uniform(0.05, 1.0), worker.dealer.reset)
        simulation.recover_after(simulation.random.uniform(0.05, 3.0), lambda: simulation.start_worker(place))

    worker.run_at(simulation.clock.now, leave)


def kill_scheduler(simulation: "Simulation") -> None:
    if simulation.scheduler.alive:
        simulation.scheduler.kill()
        longest = simulation.random.choice((0.5, 3.0, 12.0))
        simulation.recover_after(simulation.random.uniform(0.02, longest), simulation.start_scheduler)


def kill_frontend(simulation: "Simulation") -> None:
    place = simulation.random.choice(sorted(simulation.frontends))
    frontend = simulation.frontends[place]
    if frontend.alive:
        frontend.kill()
        _hang_up(simulation, frontend.dealer)
        simulation.crowd.lose(frontend)
        simulation.recover_after(simulation.random.uniform(0.1, 3.0), lambda: simulation.start_frontend(place))


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
        direction.noise = Noise(*(simulation.random.choice((0.0, 0.03, 0.2)) for _ in range(3)))
        simulation.recover_after(simulation.random.uniform(0.5, 5.0), direction.calm_down)


def fail_steps(simulation: "Simulation") -> None:
    device = simulation.devices[simulation.random.choice(sorted(simulation.devices))]
    device.failure_rate = simulation.random.uniform(0.05, 0.8)
    simulation.recover_after(simulation.random.uniform(0.1, 3.0), device.recover)


def spoil_sequences(simulation: "Simulation") -> None:
    """What a device computes of single sequences is not finite."""
    device = simulation.devices[simulation.random.choice(sorted(simulation.devices))]
    device.nan_rate = simulation.random.uniform(0.1, 0.9)
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


def _hang_up(simulation: "Simulation", dealer: Dealer) -> None:
    """The connection of a process that died: at once, after all that it had sent, or unnoticed for seconds."""
    simulation.clock.after(simulation.random.choice((0.0, 0.05, silence(simulation.random))), dealer.reset)


FAULTS: list[Fault] = [
    kill_worker,
    stop_worker,
    kill_scheduler,
    kill_frontend,
    pause,
    cut,
    reset,
    slow_link,
    noise,
    fail_steps,
    spoil_sequences,
    slow_worker,
    repin,
]
