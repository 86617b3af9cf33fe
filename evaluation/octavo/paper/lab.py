"""Runs trials and searches over the machine's cores."""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

from msgspec.structs import fields, replace

from octavo.paper.search import CURVE, Knee, Search, find_knee, run_once
from octavo.paper.trial import Result, Trial
from octavo.runtime.process.gc_tuning import collect_seldom

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

    def run(self, trials: Sequence[Trial]) -> list[Result]:
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
