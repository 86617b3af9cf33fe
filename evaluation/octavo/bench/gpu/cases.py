"""Describes the cases, each with one outcome, and runs them within a budget of time.

A case measures one figure of a goal by repeated samples. None that fails or hangs loses what the others found.
"""

import importlib.util
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Self

from octavo.bench.gpu.floors import Ceilings, Floor, floor_s

if TYPE_CHECKING:
    from octavo.bench.gpu.machine import GpuMachine


@dataclass(frozen=True)
class Samples:
    """Summarizes `count` values: the median, and the values that a tenth of them lie below and above."""

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
        """Returns the distance from low to high, as a share of the median."""
        return (self.high - self.low) / self.median if self.median else 0.0

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Returns the linear interpolation between the neighbours in `ordered`."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


# Most wanted first; then the others, as they are written down.
FIRST = ("K1", "K4", "R1", "R2", "R3", "E1")


class NotMeasured(Exception):
    """Says that something that the case needs is missing; the text names it."""


@dataclass(frozen=True)
class Goal:
    """Names a figure (`what`, in `unit`), with the values wanted and hoped for. `at_least` means that more is
    better."""

    what: str
    unit: str
    goal: float
    stretch: float
    at_least: bool = False

    def reached(self, value: float, bound: float) -> bool:
        return value >= bound if self.at_least else value <= bound

    def verdict(self, value: float) -> str:
        if self.reached(value, self.stretch):
            return "stretch"
        return "goal" if self.reached(value, self.goal) else "missed"

    def bounds(self) -> str:
        sign = ">=" if self.at_least else "<="
        return f"{sign} {self.goal:g} / {self.stretch:g} {self.unit}"


@dataclass(frozen=True)
class CaseResult:
    """Holds the figure (`value`, in the target's unit), the seconds that Octavo and each peer took, why peers are
    `missing`, and `notes` for whoever reads the JSON."""

    value: float
    ours: Samples | None = None
    peers: dict[str, Samples] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    notes: dict[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class HeldModel:
    """Names a model or service that takes long to start, so that cases that come one after the other share it."""

    name: str
    start_s: float


@dataclass(frozen=True)
class GpuCase:
    """Measures, by `run`, one figure of the named part of a goal. A case takes about `seconds`, and `held` in addition
    where that does not run yet. It needs `modules`. `floor` is the work that Octavo's own code does, where a floor is
    known."""

    goal: str
    part: str
    target: Goal
    run: Callable[["GpuMachine"], CaseResult]
    floor: Floor = ()
    seconds: float = 3.0
    held: HeldModel | None = None
    modules: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.goal} {self.part}"


@dataclass(frozen=True)
class CaseOutcome:
    """Holds a case with one of: what was `measured`, why it was `skipped`, the traceback with which it `failed`."""

    case: GpuCase
    floor_s: float | None = None
    measured: CaseResult | None = None
    skipped: str = ""
    failed: str = ""
    wall_s: float = 0.0


def in_order(cases: list[GpuCase]) -> list[GpuCase]:
    """Sorts the cases, the most wanted goals first."""
    places = {goal: place for place, goal in enumerate(FIRST)}
    return sorted(cases, key=lambda case: places.get(case.goal, len(FIRST)))


def chosen(cases: list[GpuCase], goals: list[str]) -> list[GpuCase]:
    """Selects the cases of `goals`, or all cases if `goals` is empty. Raises `ValueError` on a goal that no case
    has."""
    unknown = sorted(set(goals) - {case.goal for case in cases})
    if unknown:
        known = sorted({case.goal for case in cases})
        raise ValueError(f"there is no goal {', '.join(unknown)}; there are {', '.join(known)}")
    return [case for case in cases if not goals or case.goal in goals]


class Budget:
    """Seconds that are left of `seconds`."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def left(self) -> float:
        return self._end - self._clock()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `TimeoutError` in what takes longer; only for the main thread."""

    def expire(*_: object) -> None:
        raise TimeoutError(f"it was given {seconds:.0f} s, and was not done")

    handler = signal.signal(signal.SIGALRM, expire)
    left, interval = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        # Whoever else has set it goes on waiting.
        signal.setitimer(signal.ITIMER_REAL, left, interval)
        signal.signal(signal.SIGALRM, handler)


def run_all(
    cases: Iterable[GpuCase],
    budget: Budget,
    ceilings: Ceilings,
    measure: Callable[[GpuCase], CaseResult],
    holds: Callable[[str], bool],
) -> Iterator[CaseOutcome]:
    """Runs the cases and yields each outcome as soon as it is known. `holds(name)` tells whether the model or service
    of this name runs already."""
    for case in cases:
        floor = floor_s(case.floor, ceilings) if case.floor else None
        began = time.monotonic()
        outcome = _skipped(case, floor, budget, holds) or _measured(case, floor, measure)
        yield CaseOutcome(
            case, floor, outcome.measured, outcome.skipped, outcome.failed, wall_s=time.monotonic() - began
        )


def seconds_needed(case: GpuCase, holds: Callable[[str], bool]) -> float:
    """Returns the seconds of a case, with the start of what it needs where that does not run."""
    starts = case.held is not None and not holds(case.held.name)
    return case.seconds + (case.held.start_s if case.held and starts else 0.0)


def absent(modules: Iterable[str]) -> list[str]:
    """Returns those of `modules` that cannot be imported."""
    return [name for name in modules if not is_there(name)]


def is_there(module: str) -> bool:
    """Tells whether `module` can be found, without running any of its code but its packages'."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _skipped(case: GpuCase, floor: float | None, budget: Budget, holds: Callable[[str], bool]) -> CaseOutcome | None:
    if missing := absent(case.modules):
        return CaseOutcome(case, floor, skipped=f"{', '.join(missing)} cannot be imported")
    needed, left = seconds_needed(case, holds), budget.left()
    if needed > left:
        return CaseOutcome(case, floor, skipped=f"it takes about {needed:.0f} s, and {max(0.0, left):.0f} s are left")
    return None


def _measured(case: GpuCase, floor: float | None, measure: Callable[[GpuCase], CaseResult]) -> CaseOutcome:
    try:
        return CaseOutcome(case, floor, measured=measure(case))
    except NotMeasured as error:
        return CaseOutcome(case, floor, skipped=str(error))
    except Exception:
        return CaseOutcome(case, floor, failed=traceback.format_exc())
