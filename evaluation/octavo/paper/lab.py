"""Runs trials and searches over the machine's cores: a search finds the highest rate that a system sustains with few
trials, and runs no known trial again."""

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import fields, replace

from octavo.paper.trial import Trial, TrialResult, run
from octavo.runtime.process.gc_tuning import collect_seldom

# -- one search -------------------------------------------------------------------------------------------------------


_EVALUATION = Path(__file__).parents[1]
_ROOT = Path(__file__).parents[3]
# What decides a result.
_CODE = (
    _ROOT / "proto" / "octavo" / "wire",
    _ROOT / "proto" / "octavo" / "runtime" / "models" / "step_times.py",
    _ROOT / "scheduler" / "octavo" / "scheduler",
    _EVALUATION / "workload",
    _EVALUATION / "simulator",
    *(_EVALUATION / "paper" / f"{name}.py" for name in ("accounting", "contiguous_kv", "systems", "setups", "trial")),
)


def run_once(trial: Trial, directory: Path) -> TrialResult:
    """Reads the result if the same trial of the same code is known in the directory; otherwise runs it and writes the
    result there."""
    key = hashlib.sha256(_code() + msgspec.json.encode(trial)).hexdigest()[:24]
    path = directory / f"{key}.json"
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=TrialResult)
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


# -- all of them ------------------------------------------------------------------------------------------------------


_QUICK_SHARE: Final = 1 / 30
_QUICK_PRECISION: Final = 0.3
_QUICK_REQUESTS: Final = 20

_Task = TypeVar("_Task")
_Answer = TypeVar("_Answer")


class Lab:
    """Runs trials in `jobs` processes (1: only this one), and keeps results in `directory`. With `quick`, traces and
    searches are so short that they show no more than that everything runs. To be used in a `with` statement."""

    def __init__(self, directory: Path, *, jobs: int = 1, quick: bool = False) -> None:
        self.quick = quick
        self._directory = directory
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._jobs > 1:
            self._pool = ProcessPoolExecutor(self._jobs, mp_context=get_context("spawn"), initializer=collect_seldom)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(self, trials: Sequence[Trial]) -> list[TrialResult]:
        """Returns the results in the order of the trials."""
        return self._map(partial(run_once, directory=self._directory), [self._hurried(each) for each in trials], _name)

    def search(self, trials: Sequence[Trial], curve: Sequence[float] = CURVE) -> list[Knee]:
        """Searches for the rate that the system of each trial sustains, from the trial's own on; in their order.
        `curve`: the shares of that rate at which latencies are wanted too."""
        searches = [self._search(trial, tuple(curve)) for trial in trials]
        return self._map(partial(find_knee, directory=self._directory), searches, lambda each: _name(each.trial))

    def _search(self, trial: Trial, curve: tuple[float, ...]) -> Search:
        if self.quick:
            return Search(self._hurried(trial), curve[:1], _QUICK_PRECISION, _QUICK_REQUESTS)
        return Search(trial, curve)

    def _hurried(self, trial: Trial) -> Trial:
        return replace(trial, seconds=trial.seconds * _QUICK_SHARE) if self.quick else trial

    def _map(
        self, function: Callable[[_Task], _Answer], tasks: Sequence[_Task], name: Callable[[_Task], str]
    ) -> list[_Answer]:
        answers = []
        done = self._pool.map(function, tasks) if self._pool else map(function, tasks)
        for number, (task, answer) in enumerate(zip(tasks, done, strict=True), start=1):
            print(f"  {number} of {len(tasks)}: {name(task)}", file=sys.stderr, flush=True)
            answers.append(answer)
        return answers


def _name(trial: Trial) -> str:
    """Returns the name of a trial: what it tries, where that is not the usual."""
    usual = Trial(trial.system, trial.setup, trial.dataset, trial.rate, trial.seconds)
    names = [each.name for each in fields(Trial) if getattr(trial, each.name) != getattr(usual, each.name)]
    more = "".join(f", {name} {getattr(trial, name)}" for name in names)
    return f"{trial.system}, {trial.setup}, {trial.dataset}, from {trial.rate:g} requests/s{more}"
