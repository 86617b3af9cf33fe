"""Finds stop strings in a text that arrives in pieces, holding back no more than could be the start of one."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scanned:
    """`text` may be sent. `matched` is the stop string that ends the text here, if one was found."""

    text: str
    matched: str | None = None


class StopStrings:
    """The match that is complete first wins, and of those complete at once the longest.

    So the result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stop_strings: Sequence[str], *, include_stop: bool) -> None:
        self._stop_strings = tuple(stop_strings)
        self._include_stop = include_stop
        self._held = ""

    def feed(self, text: str, *, searching: bool = True) -> Scanned:
        """Takes the next piece; after a match nothing more may be fed.

        No stop string is found that ends in a piece for which `searching` is off; it may begin there.
        """
        buffer = self._held + text
        if searching and (found := self._matches(buffer)):
            end, start, stop = min(found)
            self._held = ""
            return Scanned(buffer[: end if self._include_stop else start], stop)
        keep = self._longest_possible_start(buffer)
        self._held = buffer[len(buffer) - keep :]
        return Scanned(buffer[: len(buffer) - keep])

    def flush(self) -> str:
        """The text that was held back, once it is known that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _matches(self, buffer: str) -> list[tuple[int, int, str]]:
        """(end, start, stop string) of the first match of each that ends in what is new in `buffer`."""
        held = len(self._held)
        starts = [(buffer.find(stop, max(0, held - len(stop) + 1)), stop) for stop in self._stop_strings]
        return [(start + len(stop), start, stop) for start, stop in starts if start >= 0]

    def _longest_possible_start(self, buffer: str) -> int:
        longest = max((len(stop) for stop in self._stop_strings), default=1)
        for length in range(min(longest - 1, len(buffer)), 0, -1):
            if any(stop.startswith(buffer[-length:]) for stop in self._stop_strings):
                return length
        return 0
