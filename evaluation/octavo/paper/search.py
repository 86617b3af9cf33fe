"""The highest rate that a system sustains, by as few trials as it takes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from octavo.paper.cached import run_once
from octavo.paper.knee import Curve, sustained
from octavo.paper.trial import Trial

# Normalised latency, in seconds per token, above which a rate is not sustained: where the paper's curves are steep.
LIMIT_S: Final = 0.5
# Shares of the rate that is sustained at which a curve is drawn, beside those that the search tries.
CURVE: Final = (0.3, 0.6, 0.85)


@dataclass(frozen=True)
class Search:
    """For the highest rate that the system of `trial` sustains, from the trial's own on, to a `precision` (a share).
    Its curve is also drawn at these shares of it. A trace is longer than the trial's if it would otherwise have fewer
    than `least_requests`."""

    trial: Trial
    curve: tuple[float, ...] = ()
    precision: float = 0.05
    least_requests: int = 200


class Knee(Struct, frozen=True):
    """The rate that is sustained, and normalised latencies in seconds per token by rate."""

    rate: float
    rates: list[float]
    latencies: list[float]


def find_knee(search: Search, directory: Path) -> Knee:
    """Keeps the trials' results in the directory. Raises `NoKneeError`."""

    def latency(rate: float) -> float:
        seconds = max(search.trial.seconds, search.least_requests / rate)
        return run_once(replace(search.trial, rate=rate, seconds=seconds), directory).normalised_latency_s

    curve = Curve(latency)
    rate = sustained(curve, search.trial.rate, LIMIT_S, search.precision)
    for share in search.curve:
        curve.at(rate * share)
    rates = sorted(curve.points)
    return Knee(rate, rates, [curve.points[each] for each in rates])
