"""The wires between places and the scheduler: in order like TCP where nothing is wrong, and all that can go wrong."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from octavo.testing.simulation.clock import Action

if TYPE_CHECKING:
    from octavo.testing.simulation.network import Connection, Network

_NORMAL_DELAY_S = 0.002
_SILENCE_S = (6.0, 8.0)
_OVERTAKEN_S = 3.0

Deliver = Callable[[bytes], None]


def silence(random: Random) -> float:
    """Seconds until the library's heartbeats take a silent connection for lost."""
    return random.uniform(*_SILENCE_S)


@dataclass
class Noise:
    """Describes what happens to single messages beyond anything TCP does, as probabilities."""

    loss: float = 0.0
    doubling: float = 0.0
    overtaking: float = 0.0


class Direction:
    """Carries messages one way over a link. `delay` is the longest time of a message, in seconds."""

    def __init__(self, network: "Network", name: str) -> None:
        self.delay = _NORMAL_DELAY_S
        self.noise: Noise | None = None
        self._cut_until = 0.0
        # What arrives during a cut waits for its end, as what TCP sends again does.
        self._held: list[Action] = []
        self._network = network
        self._name = name
        self._last_arrival = 0.0

    def carry(self, connection: "Connection", frame: bytes, deliver: Deliver) -> None:
        """Sends a message over a connection."""
        network = self._network
        network.trace.note(network.clock.now, self._name, frame)
        arrive = partial(self._arrive, connection, frame, deliver)
        for delay in (0.0,) if self.noise is None else self._disturb(self.noise):
            arrival = network.clock.now + network.random.random() * self.delay
            if not delay:
                arrival = self._last_arrival = max(arrival, self._last_arrival)
            network.clock.at(arrival + delay, arrive)

    @property
    def is_cut(self) -> bool:
        return self._cut_until > self._network.clock.now

    def cut(self, seconds: float) -> None:
        """Nothing gets through for so long."""
        self._cut_until = max(self._cut_until, self._network.clock.now + seconds)
        self._network.clock.at(self._cut_until, self._mend)

    def calm_down(self) -> None:
        """Restores normal delays, without noise."""
        self.delay, self.noise = _NORMAL_DELAY_S, None

    def _disturb(self, noise: Noise) -> list[float]:
        """Draws the extra delays with which a message's copies arrive."""
        happens = self._network.happens
        num_copies = 1 - happens("message lost", noise.loss) + happens("message doubled", noise.doubling)
        return [
            self._network.random.uniform(0, _OVERTAKEN_S) if happens("message overtaken", noise.overtaking) else 0.0
            for _ in range(num_copies)
        ]

    def _arrive(self, connection: "Connection", frame: bytes, deliver: Deliver) -> None:
        if self.is_cut:
            self._held.append(partial(self._arrive, connection, frame, deliver))
        elif not connection.lost:
            deliver(frame)

    def _mend(self) -> None:
        held, self._held = self._held, []
        for arrive in held:
            arrive()


class Link:
    """The wire between a place, whoever lives there, and the scheduler. `was_noisy`: its messages were not always those
    of TCP."""

    def __init__(self, network: "Network", place: str) -> None:
        self.up = Direction(network, f"{place} ->")
        self.down = Direction(network, f"-> {place}")
        self.was_noisy = False

    @property
    def directions(self) -> tuple[Direction, Direction]:
        return self.up, self.down

    @property
    def is_cut(self) -> bool:
        return self.up.is_cut or self.down.is_cut
