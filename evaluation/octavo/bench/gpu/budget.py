"""Runs cases one after the other, within a budget of time: none that fails or hangs back loses what the others
found."""

import importlib.util
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from octavo.bench.gpu.cases import CaseOutcome, CaseResult, GpuCase, NotMeasured
from octavo.bench.gpu.floors import Ceilings, floor_s


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
