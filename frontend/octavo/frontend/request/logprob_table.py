"""Logprobs in columns: a twentieth of the memory that objects take, and let go of at once however many there are."""

from array import array
from collections.abc import Iterable, Sequence
from typing import overload

from octavo.wire.sampling import Logprobs


class LogprobTable(Sequence[Logprobs]):
    """`Logprobs` in order, made as they are looked at. It grows at its end; a slice is a view of what was there."""

    __slots__ = ("_chosen", "_ends", "_ranks", "_start", "_stop", "_top_ids", "_top_logprobs")

    def __init__(self, entries: Iterable[Logprobs] = ()) -> None:
        self._chosen = array("d")
        self._ranks = array("I")
        self._top_ids = array("i")
        self._top_logprobs = array("d")
        # Where the likeliest tokens of each entry end.
        self._ends = array("L")
        self._start = 0
        self._stop: int | None = None
        self.extend(entries)

    def extend(self, entries: Iterable[Logprobs]) -> None:
        """Takes more in. Not for views."""
        assert self._stop is None, "a view does not grow"
        for entry in entries:
            self._chosen.append(entry.logprob)
            self._ranks.append(entry.rank)
            self._top_ids.extend(entry.top_token_ids)
            self._top_logprobs.extend(entry.top_logprobs)
            self._ends.append(len(self._top_ids))

    @property
    def num_numbers(self) -> int:
        """Logprobs in it, those of the likeliest tokens included."""
        start, stop = self._start, self._start + len(self)
        return stop - start + (self._end(stop - 1) - self._end(start - 1))

    @property
    def chosen(self) -> Sequence[float]:
        """The logprob of each entry's own token."""
        return self._chosen[self._start : self._start + len(self)]

    def __len__(self) -> int:
        return (len(self._chosen) if self._stop is None else self._stop) - self._start

    @overload
    def __getitem__(self, index: int) -> Logprobs: ...

    @overload
    def __getitem__(self, index: slice) -> "LogprobTable": ...

    def __getitem__(self, index: int | slice) -> "Logprobs | LogprobTable":
        if isinstance(index, slice):
            return self._view(index)
        place = self._start + range(len(self))[index]
        top = slice(self._end(place - 1), self._ends[place])
        return Logprobs(
            self._chosen[place], self._ranks[place], self._top_ids[top].tolist(), self._top_logprobs[top].tolist()
        )

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def _end(self, place: int) -> int:
        return self._ends[place] if place >= 0 else 0

    def _view(self, part: slice) -> "LogprobTable":
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise ValueError("a view has no gaps")
        view = LogprobTable.__new__(LogprobTable)
        view._chosen, view._ranks, view._ends = self._chosen, self._ranks, self._ends
        view._top_ids, view._top_logprobs = self._top_ids, self._top_logprobs
        view._start, view._stop = self._start + start, self._start + max(start, stop)
        return view


def num_numbers(logprobs: Sequence[Logprobs]) -> int:
    """Logprobs in a sequence of them, those of the likeliest tokens included."""
    if isinstance(logprobs, LogprobTable):
        return logprobs.num_numbers
    return sum(1 + len(entry.top_token_ids) for entry in logprobs)


def chosen(logprobs: Sequence[Logprobs]) -> Sequence[float]:
    """The logprob of each entry's own token."""
    return logprobs.chosen if isinstance(logprobs, LogprobTable) else [entry.logprob for entry in logprobs]
