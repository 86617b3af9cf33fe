"""How fast work gets done while there is some."""

import math
from typing import Final

# What is believed before anything was seen.
_FIRST_GUESS: Final = 1000.0
_SMOOTHED_OVER_S: Final = 5.0


class ServiceRate:
    """Tokens of work per second of the time that there was work, the last seconds counting most. Times are in seconds,
    of any clock that does not run back."""

    def __init__(self, now: float) -> None:
        self._rate = _FIRST_GUESS
        self._at = now

    def done(self, tokens: int, now: float, *, busy: bool) -> None:
        """So many tokens are done; `busy` is whether there was work since the last call."""
        self._pass_time(now, busy)
        self._rate += tokens / _SMOOTHED_OVER_S

    def at(self, now: float, *, busy: bool) -> float:
        """The rate now; `busy` as in `done`."""
        self._pass_time(now, busy)
        return self._rate

    def _pass_time(self, now: float, busy: bool) -> None:
        if busy:
            self._rate *= math.exp((self._at - now) / _SMOOTHED_OVER_S)
        self._at = now
