"""A seed's run and what came of it."""

import contextlib
import logging
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.testing.simulation.simulation import Simulation


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    """Silences the logs of the simulated processes, which would write thousands of lines."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@dataclass(frozen=True)
class Outcome:
    """Holds the result of a run. `failure` says what was found wrong, with the last events; `virtual_s` is the time
    that the run would have taken; `digest` that of the whole trace, if that was to be hashed."""

    seed: int
    failure: str | None
    counts: Counter[str]
    virtual_s: float
    digest: str | None


def simulate(seed: int, directory: Path, *, hashing: bool = False) -> Outcome:
    """Runs the scenario of a seed, with the fake model in `directory`."""
    simulation = Simulation(seed, directory, hashing=hashing)
    failure = None
    with _quiet_logs():
        try:
            simulation.run()
        except Exception:
            failure = "\n".join([*simulation.trace.lines(), traceback.format_exc()])
    digest = simulation.trace.digest if hashing else None
    return Outcome(seed, failure, simulation.watch.counts, simulation.clock.now, digest)
