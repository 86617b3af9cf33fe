"""What the main loop lets other threads know of it, so that one that hangs cannot look alive."""

import time
from collections.abc import Callable

# A turn outside a step takes milliseconds; a loop that has not turned for this long is stuck.
DEADLINE_S = 10.0
# Three times what a scheduler allows a step of a new shape, which may compile. By then it has given the worker up; this
# tells whoever could start the process anew.
STEP_DEADLINE_S = 180.0


class Liveness:
    """Written by the main loop alone, read by any thread. Loading a model has no deadline."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turned_at: float | None = None
        self._owing_since: float | None = None
        self.welcomed = False
        self.draining = False

    def turn(self, *, idle: bool = True) -> None:
        """The loop is between two pieces of work, and owes another turn within `DEADLINE_S`; `idle` if no step is under
        way."""
        self._turned_at = self._clock()
        if idle:
            self._owing_since = None

    def work(self) -> None:
        """The loop begins work of unknown length."""
        self._turned_at = None

    def owe(self) -> None:
        """A step is begun: the first of those under way is to be done within `STEP_DEADLINE_S`."""
        if self._owing_since is None:
            self._owing_since = self._clock()

    def done(self) -> None:
        """A step is done: the time of the next under way begins."""
        self._owing_since = self._clock()

    @property
    def alive(self) -> bool:
        now = self._clock()
        return _is_within(self._turned_at, DEADLINE_S, now) and _is_within(self._owing_since, STEP_DEADLINE_S, now)

    @property
    def ready(self) -> bool:
        """Alive, welcomed by a scheduler, and not about to end."""
        return self.alive and self.welcomed and not self.draining


def _is_within(since: float | None, deadline_s: float, now: float) -> bool:
    return since is None or now - since <= deadline_s
