"""What the main loop lets other threads know of it, so that one that hangs between its steps cannot look alive."""

import time
from collections.abc import Callable

# A turn outside a step takes milliseconds; a loop that has not turned for this long is stuck.
DEADLINE_S = 10.0


class Liveness:
    """Written by the main loop alone, read by any thread.

    Loading a model and computing a step have no deadline here: how long they may take, the scheduler judges.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turned_at: float | None = None
        self.welcomed = False

    def turn(self) -> None:
        """The loop is between two pieces of work, and owes another turn within `DEADLINE_S`."""
        self._turned_at = self._clock()

    def work(self) -> None:
        """The loop begins work of unknown length."""
        self._turned_at = None

    @property
    def alive(self) -> bool:
        turned_at = self._turned_at
        return turned_at is None or self._clock() - turned_at <= DEADLINE_S

    @property
    def ready(self) -> bool:
        """Alive, and welcomed by a scheduler."""
        return self.alive and self.welcomed
