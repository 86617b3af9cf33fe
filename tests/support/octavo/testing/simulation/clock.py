"""Virtual time: a heap of what is to happen, and processes that may stand still or die."""

import heapq
from collections.abc import Callable
from itertools import count

Action = Callable[[], None]
NEVER = float("inf")


class Clock:
    """Runs actions in the order of their times, those of one time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Action]] = []
        self._count = count()

    def at(self, time: float, action: Action) -> None:
        """Something is to happen at `time`, or now if that has passed."""
        heapq.heappush(self._heap, (max(time, self.now), next(self._count), action))

    def after(self, seconds: float, action: Action) -> None:
        """Something is to happen `seconds` from now."""
        self.at(self.now + seconds, action)

    def step(self) -> None:
        """The next thing happens."""
        self.now, _, action = heapq.heappop(self._heap)
        action()


class Process:
    """One life of a process: a loop that turns when it is woken. While it stands still nothing of it happens."""

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock = clock
        self.name = name
        self.alive = True
        self._stalled_until = 0.0
        self._wakes_at = NEVER

    @property
    def local_now(self) -> float:
        """The time at which what it does now is done: later than now inside a turn that has taken time."""
        return max(self.clock.now, self._stalled_until)

    def turn(self) -> float:
        """Does all that is due; when it wants to turn again of its own accord."""
        raise NotImplementedError

    def wake(self, time: float = 0.0) -> None:
        """Makes sure that the process turns at `time` at the latest."""
        time = max(time, self.clock.now)
        if time < self._wakes_at:
            self._wakes_at = time
            self.clock.at(time, lambda: self._fire(time))

    def stall(self, seconds: float) -> None:
        """Keeps the process from turning for so many seconds: it stands still, or works."""
        self._stalled_until = max(self._stalled_until, self.clock.now + seconds)

    def run_at(self, time: float, action: Action) -> None:
        """Does something at `time` or, if it stands still then, as soon as it goes on."""
        self.clock.at(time, lambda: self._run(action))

    def kill(self) -> None:
        self.alive = False

    def _fire(self, time: float) -> None:
        # Another wake-up may have taken this one's place.
        if not self.alive or time != self._wakes_at:
            return
        self._wakes_at = NEVER
        if self._stalled_until > self.clock.now:
            self.wake(self._stalled_until)
        else:
            self.wake(self.turn())

    def _run(self, action: Action) -> None:
        if self.alive and self._stalled_until > self.clock.now:
            self.run_at(self._stalled_until, action)
        elif self.alive:
            action()
