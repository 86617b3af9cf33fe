"""Which mutants the tests kill: each is planted in a copy of its own, and tests run in it until one fails."""

import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .catalogue import Mutant
from .tree import copy_tree, first_failure

# Long searches, tried last.
SLOW_TESTS = {
    "scheduler/machines/test_block_manager_machine.py",
    "scheduler/machines/test_scheduler_machine.py",
    "scheduler/machines/test_small_scope.py",
}
# Sockets, command lines and operators' figures: they say little of the core, and the first not in any order; and what
# plants mutants of its own, which may not fit beside another.
OTHER_TESTS = {
    "scheduler/machines/test_planted_defects.py",
    "scheduler/server/test_admin.py",
    "scheduler/cli/test_admin_cli.py",
    "scheduler/cli/test_config_flags.py",
    "scheduler/kv/test_memory_figures.py",
    "scheduler/server/test_metrics.py",
    "scheduler/core/faults/test_watchdog.py",
    "scheduler/server/test_request_spans.py",
    "scheduler/test_sequence_names.py",
    "scheduler/server/test_shell.py",
    "scheduler/server/test_step_feed.py",
}


class BaselineError(Exception):
    """A test fails without any mutant, so it says nothing about one."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`killed_by`: the test that failed first; None if all passed. `seconds`: of testing, which ends at that test."""

    mutant: Mutant
    killed_by: str | None
    seconds: float


class Baseline:
    """A copy without mutants. A mutant is judged only by tests that pass in it."""

    def __init__(self, repository: Path, directory: Path) -> None:
        self.tree = directory / "baseline"
        copy_tree(repository, self.tree)
        self._passing: set[str] = set()
        self._lock = threading.Lock()

    def require(self, tests: Sequence[str]) -> None:
        """Runs those of `tests` that have not passed yet. Raises `BaselineError` if one fails."""
        with self._lock:
            fresh = [test for test in tests if test not in self._passing]
            if fresh and (failure := first_failure(self.tree, fresh)):
                raise BaselineError(f"{failure} fails without any mutant")
            self._passing.update(fresh)

    def stages(self, mutant: Mutant) -> Iterator[list[str]]:
        """Tests for a mutant in the order of trying: its own, the other examples, the long searches."""
        found = (path.relative_to(self.tree / "tests") for path in (self.tree / "tests/scheduler").rglob("test_*.py"))
        likeliest = mutant.test_files(self.tree)
        rest = sorted(set(map(str, found)) - OTHER_TESTS - set(likeliest))
        yield likeliest
        yield [test for test in rest if test not in SLOW_TESTS]
        yield [test for test in rest if test in SLOW_TESTS]


def judge(mutants: Sequence[Mutant], repository: Path, *, processes: int) -> Iterator[Verdict]:
    """Verdicts in the order of `mutants`, `processes` tests at a time."""
    with tempfile.TemporaryDirectory(prefix="octavo-mutants-") as name:
        directory = Path(name)
        baseline = Baseline(repository, directory)
        baseline.require(sorted({test for mutant in mutants for test in mutant.test_files(repository)}))
        with ThreadPoolExecutor(processes) as pool:
            # No path is longer than the baseline's, or a socket's may be too long for the system where it was not.
            trees = (directory / str(number) for number in range(len(mutants)))
            yield from pool.map(lambda mutant, tree: _judge(mutant, baseline, tree), mutants, trees)


def _judge(mutant: Mutant, baseline: Baseline, tree: Path) -> Verdict:
    copy_tree(baseline.tree, tree)
    mutant.plant(tree)
    failure, seconds = None, 0.0
    for tests in filter(None, baseline.stages(mutant)):
        baseline.require(tests)
        start = time.monotonic()
        failure = first_failure(tree, tests)
        seconds += time.monotonic() - start
        if failure:
            break
    shutil.rmtree(tree)
    return Verdict(mutant, failure, seconds)
