"""Computes percentiles, of values and of a histogram of times."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import expm1, log1p
from typing import Final

# A bucket is this part of its times wide, and of one microsecond more.
_BUCKET_WIDTH: Final = 0.01
_BUCKETS_PER_E: Final = 1 / log1p(_BUCKET_WIDTH)
# The last one ends after 30 years.
_NUM_BUCKETS: Final = 3500


def percentile(ordered: Sequence[float], q: float) -> float:
    """Returns the value that `q` % of `ordered`, in rising order, do not exceed; between two neighbours, on the line
    from one to the other. Raises `ValueError` if there is no value."""
    rank, share = _place(q, len(ordered))
    return ordered[rank] + share * (ordered[rank + 1] - ordered[rank]) if share else ordered[rank]


def _place(q: float, count: int) -> tuple[int, float]:
    if not count:
        raise ValueError("there are no values, so they have no percentile")
    if not 0.0 <= q <= 100.0:
        raise ValueError(f"a percentile is from 0 to 100, not {q}")
    place = q / 100 * (count - 1)
    return int(place), place - int(place)


@dataclass(frozen=True)
class Spread:
    """Holds the mean, percentiles and maximum of times, in seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """Returns the exact spread of `values`; None if there is no value."""
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p90, p95, p99 = (percentile(ordered, q) for q in (50, 90, 95, 99))
        return cls(sum(ordered) / len(ordered), p50, p90, p95, p99, ordered[-1])


STATISTICS: Final = tuple(field.name for field in fields(Spread))


class Gaps:
    """Counts many times, such as those between tokens, in a histogram. The buckets are 1 % wide, so the percentiles are
    within 1 % of the exact (of times below a microsecond, within 0.01 us); mean and maximum are exact."""

    __slots__ = ("_counts", "_max", "_total")

    def __init__(self) -> None:
        self._counts = [0] * _NUM_BUCKETS
        self._total = 0.0
        self._max = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Counts a time `count` times. Raises `ValueError` if it is negative."""
        if seconds < 0.0:
            raise ValueError(f"a time cannot be negative: {seconds} s")
        self._counts[int(log1p(seconds * 1e6) * _BUCKETS_PER_E)] += count
        self._total += seconds * count
        if seconds > self._max:
            self._max = seconds

    def merge(self, other: "Gaps") -> None:
        """Adds all that `other` has counted."""
        self._counts = [mine + its for mine, its in zip(self._counts, other._counts, strict=True)]
        self._total += other._total
        self._max = max(self._max, other._max)

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def mean(self) -> float:
        """Returns the mean in seconds; 0 if nothing was counted."""
        return self._total / max(self.count, 1)

    def percentile(self, q: float) -> float:
        """Returns the time in seconds that `q` % of all do not exceed. Raises `ValueError` if nothing was counted."""
        rank, share = _place(q, self.count)
        low = self._at(rank)
        return low + share * (self._at(rank + 1) - low) if share else low

    def spread(self) -> Spread | None:
        """Returns the spread, None if nothing was counted."""
        if not self.count:
            return None
        p50, p90, p95, p99 = (self.percentile(q) for q in (50, 90, 95, 99))
        return Spread(self.mean, p50, p90, p95, p99, self._max)

    def _at(self, rank: int) -> float:
        seen = 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if seen > rank:
                return min(expm1((bucket + 0.5) / _BUCKETS_PER_E) * 1e-6, self._max)
        raise IndexError(rank)
