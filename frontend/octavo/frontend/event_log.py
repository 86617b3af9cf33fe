"""What a request has told, kept in four bytes per piece: its journal can make the pieces again."""

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from octavo.frontend.events import Emitted, Event, Finished, Notice, Piece, Started, Usage
from octavo.wire.sampling import MAX_PARALLEL


class PieceMark(NamedTuple):
    """A piece without its text: so many tokens of the sequence that has the index `place` in the answer."""

    place: int
    num_tokens: int


class EventLog:
    """Events in order; the first has offset 1. A piece holds at least one token."""

    def __init__(self) -> None:
        # Of a piece its number of tokens and its index in one number; 0 for any other event.
        self._marks = array("I")
        self._others: list[Started | Finished | Usage | Notice] = []

    def __len__(self) -> int:
        return len(self._marks)

    def add(self, event: Event) -> Emitted:
        """Gives the event its place."""
        if isinstance(event, Piece):
            self._marks.append(len(event.token_ids) * MAX_PARALLEL + event.index)
        else:
            self._marks.append(0)
            self._others.append(event)
        return Emitted(len(self._marks), event)

    def entries(self) -> Iterator[PieceMark | Started | Finished | Usage | Notice]:
        """All of them, from the first on."""
        others = iter(self._others)
        for mark in self._marks:
            yield PieceMark(mark % MAX_PARALLEL, mark // MAX_PARALLEL) if mark else next(others)
