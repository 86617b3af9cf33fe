"""The highest rate of requests that a system sustains: where its curve of latencies turns up."""

from collections.abc import Callable
from dataclasses import dataclass, field

_STEP = 1.3
_MOST_STEPS = 24


class NoKneeError(Exception):
    """No rate that was tried is sustained, or all are."""


@dataclass
class Curve:
    """Latencies by rate, each asked for once."""

    latency: Callable[[float], float]
    points: dict[float, float] = field(default_factory=dict)

    def at(self, rate: float) -> float:
        if rate not in self.points:
            self.points[rate] = self.latency(rate)
        return self.points[rate]


def sustained(curve: Curve, guess: float, limit: float, precision: float) -> float:
    """The highest rate at which the latency is at most `limit`: it is, and at `precision` (a share) above it is not
    any more. Looks from `guess` on. Raises `NoKneeError` where there is none near."""
    low, high = _bracket(curve, guess, limit)
    while high > low * (1 + precision):
        middle = (low * high) ** 0.5
        if curve.at(middle) <= limit:
            low = middle
        else:
            high = middle
    return low


def _bracket(curve: Curve, guess: float, limit: float) -> tuple[float, float]:
    """Rates next to each other of which the lower one is sustained and the higher one is not."""
    rate, held = guess, curve.at(guess) <= limit
    for _ in range(_MOST_STEPS):
        other = rate * _STEP if held else rate / _STEP
        if (curve.at(other) <= limit) != held:
            return min(rate, other), max(rate, other)
        rate = other
    kept = "every" if held else "no"
    raise NoKneeError(f"{kept} rate from {guess:g} to {rate:g} keeps the latency at most {limit:g}")
