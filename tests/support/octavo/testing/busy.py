"""Runs tests as on a machine that is too busy for them: `python -m octavo.testing.busy --seed N PYTEST-ARGUMENTS`.

Event loops of the tests rest now and then between two turns. The tests' process and those that it starts are stopped
for a while. Whatever a test takes for settled by then, and is not, shows.
"""

import argparse
import asyncio.base_events
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

_SEED: Final = "OCTAVO_TEST_BUSY_SEED"
# Of short rests and of long ones: before how many of a hundred turns of an event loop, and seconds from ... to.
_RESTS: Final = ((13, 0.0, 0.01), (2, 0.02, 0.25))
# Seconds for which a process is stopped, and between two that are.
_STOP_S, _PAUSE_S = (0.05, 0.5), (0.05, 0.4)
# Tests may replace it.
_sleep: Final = time.sleep


def pytest_configure(config: pytest.Config) -> None:
    """Lets event loops rest, where this module is pytest's plugin."""
    loop: Any = asyncio.base_events.BaseEventLoop
    turn, random = loop._run_once, Random(os.environ.get(_SEED, "0"))

    def rest_then_turn(self: asyncio.BaseEventLoop) -> None:
        for share, shortest, longest in _RESTS:
            if random.random() * 100 < share:
                _sleep(random.uniform(shortest, longest))
        turn(self)

    patch = pytest.MonkeyPatch()
    patch.setattr(loop, "_run_once", rest_then_turn)
    config.add_cleanup(patch.undo)


def descendants(root: int) -> list[int]:
    """Returns the processes that `root` has started, and those that these have."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        if fields := _fields(stat):
            parents[int(stat.parent.name)] = int(fields[1])
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in found | {root}} - found:
        found |= more
    return sorted(found)


def _fields(stat: Path) -> list[str]:
    """Returns a process's state, its parent and so on; nothing if it has ended."""
    try:
        return stat.read_text().rpartition(")")[2].split()
    except OSError:
        return []


def stop_for_a_while(pid: int, seconds: float) -> bool:
    """Stops a process and lets it go on; returns whether it did, for it may have ended, or be stopped by a test."""
    if _fields(Path(f"/proc/{pid}/stat"))[:1] in ([], ["T"], ["Z"]):
        return False
    try:
        os.kill(pid, signal.SIGSTOP)
        _sleep(seconds)
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="What rests and stops are drawn from.")
    given, tests = parser.parse_known_args(arguments)
    random, stops = Random(given.seed), 0
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-p", "octavo.testing.busy", *tests]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path, _SEED: str(given.seed)}) as running:
        while running.poll() is None:
            pid = random.choice([running.pid, *descendants(running.pid)])
            stops += stop_for_a_while(pid, random.uniform(*_STOP_S))
            _sleep(random.uniform(*_PAUSE_S))
    print(f"processes were stopped {stops} times")
    return running.returncode


if __name__ == "__main__":
    sys.exit(main())
