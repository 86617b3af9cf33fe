"""Repeated measurements of one thing."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True)
class Sample:
    """Of `count` values the median, and what a tenth of them lie below and above."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Raises `ValueError` if there are none."""
        ordered = sorted(values)
        if not ordered:
            raise ValueError("nothing was measured")
        return cls(statistics.median(ordered), _quantile(ordered, 0.1), _quantile(ordered, 0.9), len(ordered))

    @property
    def spread(self) -> float:
        """From low to high, as a share of the median."""
        return (self.high - self.low) / self.median if self.median else 0.0

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between neighbours."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
