"""Draws the times at which requests come."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, repeat
from math import inf, isfinite
from random import Random
from typing import Protocol


class Arrivals(Protocol):
    """Times at which requests come, without an end."""

    @property
    def rate(self) -> float:
        """Requests per second; infinite if all come at once."""
        ...

    def times(self, random: Random) -> Iterator[float]:
        """Yields seconds after the start, in rising order."""
        ...


@dataclass(frozen=True)
class Poisson:
    """Draws independent times, `rate` per second on average."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def times(self, random: Random) -> Iterator[float]:
        time = 0.0
        while True:
            time += random.expovariate(1.0) / self.rate
            yield time


@dataclass(frozen=True)
class Regular:
    """Spaces `rate` times per second at equal distances, the first at once."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def times(self, random: Random) -> Iterator[float]:
        return (place / self.rate for place in count())


@dataclass(frozen=True)
class AtOnce:
    """Lets all requests come at the start."""

    @property
    def rate(self) -> float:
        return inf

    def times(self, random: Random) -> Iterator[float]:
        return repeat(0.0)


def _check_rate(rate: float) -> None:
    if not (isfinite(rate) and rate > 0.0):
        raise ValueError(f"a rate must be above 0 requests per second, and finite, not {rate}")
