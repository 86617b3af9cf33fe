"""Finds the highest rate that a system sustains with few trials, and runs no known trial again."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from octavo.paper.trial import Result, Trial, run

_EVALUATION = Path(__file__).parents[1]
_ROOT = Path(__file__).parents[3]
# What decides a result.
_CODE = (
    _ROOT / "proto" / "octavo" / "wire",
    _ROOT / "proto" / "octavo" / "runtime" / "models" / "step_times.py",
    _ROOT / "scheduler" / "octavo" / "scheduler",
    _EVALUATION / "workload",
    _EVALUATION / "simulator",
    _EVALUATION / "paper" / "baselines",
    *(_EVALUATION / "paper" / name for name in ("systems.py", "setups.py", "trial.py")),
)


def run_once(trial: Trial, directory: Path) -> Result:
    """Reads the result if the same trial of the same code is known in the directory; otherwise runs it and writes the
    result there."""
    key = hashlib.sha256(_code() + msgspec.json.encode(trial)).hexdigest()[:24]
    path = directory / f"{key}.json"
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Result)
    result = run(trial)
    # Others may write the same at the same time.
    written = path.with_suffix(f".{os.getpid()}")
    written.write_bytes(msgspec.json.encode(result))
    written.rename(path)
    return result


@cache
def _code() -> bytes:
    """Returns a digest of the code that runs trials."""
    files = sorted(file for each in _CODE for file in ([each] if each.is_file() else each.rglob("*.py")))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.digest()


_STEP = 1.3
_MOST_STEPS = 24


class NoKneeError(Exception):
    """Says that no rate that was tried is sustained, or all are."""


@dataclass
class Curve:
    """Holds latencies by rate, each asked for once."""

    latency: Callable[[float], float]
    points: dict[float, float] = field(default_factory=dict)

    def at(self, rate: float) -> float:
        if rate not in self.points:
            self.points[rate] = self.latency(rate)
        return self.points[rate]


def sustained(curve: Curve, guess: float, limit: float, precision: float) -> float:
    """Returns the highest rate at which the latency is at most `limit`: it is, and at `precision` (a share) above it is
    not any more.

    The search looks from `guess` on. Raises `NoKneeError` where there is none near.
    """
    low, high = _bracket(curve, guess, limit)
    while high > low * (1 + precision):
        middle = (low * high) ** 0.5
        if curve.at(middle) <= limit:
            low = middle
        else:
            high = middle
    return low


def _bracket(curve: Curve, guess: float, limit: float) -> tuple[float, float]:
    """Returns rates next to each other of which the lower one is sustained and the higher one is not."""
    rate, held = guess, curve.at(guess) <= limit
    for _ in range(_MOST_STEPS):
        other = rate * _STEP if held else rate / _STEP
        if (curve.at(other) <= limit) != held:
            return min(rate, other), max(rate, other)
        rate = other
    kept = "every" if held else "no"
    raise NoKneeError(f"{kept} rate from {guess:g} to {rate:g} keeps the latency at most {limit:g}")


# Normalised latency, in seconds per token, above which a rate is not sustained: where the paper's curves are steep.
LIMIT_S: Final = 0.5
# Shares of the rate that is sustained at which a curve is drawn, beside those that the search tries.
CURVE: Final = (0.3, 0.6, 0.85)


@dataclass(frozen=True)
class Search:
    """Describes a search for the highest rate that the system of `trial` sustains, from the trial's own on, to a
    `precision` (a share).

    The curve is also drawn at these shares of that rate. A trace is longer than the trial's if it would otherwise have
    fewer than `least_requests`.
    """

    trial: Trial
    curve: tuple[float, ...] = ()
    precision: float = 0.05
    least_requests: int = 200


class Knee(Struct, frozen=True):
    """Holds the rate that is sustained, and normalised latencies in seconds per token by rate."""

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
