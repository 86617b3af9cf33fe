"""Readings of the books that take so long that they must not be made at every wish."""

from collections.abc import Callable
from typing import Final, Generic, TypeVar

Reading = TypeVar("Reading")
# Of all time, what is spent on readings; but none is older than the other bound, in seconds.
_SHARE: Final = 0.01
_MOST_SECONDS: Final = 5.0


class Snapshots(Generic[Reading]):
    """The latest reading for all who ask; `read` makes a new one once the last has paid for its time, as `clock` (in
    seconds) has told it."""

    def __init__(self, read: Callable[[], Reading], clock: Callable[[], float]) -> None:
        self._read = read
        self._clock = clock
        self._latest: Reading | None = None
        self._next_at = float("-inf")

    def latest(self) -> Reading:
        """A new reading, or the last one while it is too early for another."""
        began = self._clock()
        if self._latest is None or began >= self._next_at:
            self._latest = self._read()
            took = self._clock() - began
            self._next_at = began + min(took / _SHARE, _MOST_SECONDS)
        return self._latest

    @property
    def seconds_to_next(self) -> float:
        """Until there may be a new reading; not below 0."""
        return max(0.0, self._next_at - self._clock())
