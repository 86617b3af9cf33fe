"""Finds stop strings in a text that arrives in pieces, holding back no more than could be the start of one."""

from collections.abc import Sequence
from typing import NamedTuple


class Scanned(NamedTuple):
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

    def __bool__(self) -> bool:
        """Whether there is anything to find."""
        return bool(self._stop_strings)

    def feed(self, text: str, *, searching: bool = True) -> Scanned:
        """Takes the next piece; after a match nothing more may be fed.

        No stop string is found that ends in a piece for which `searching` is off; it may begin there.
        """
        if not self._stop_strings:
            return Scanned(text)
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
        return max(_overlap(buffer, stop) for stop in self._stop_strings)


def _overlap(buffer: str, stop: str) -> int:
    """Length of the longest end of `buffer` that begins `stop` without being all of it."""
    at = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1))
    while at >= 0 and not stop.startswith(buffer[at:]):
        at = buffer.find(stop[0], at + 1)
    return len(buffer) - at if at >= 0 else 0
