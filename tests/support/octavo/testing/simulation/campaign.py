"""Runs many seeds on all cores: counts which of them break something, and how often everything happened."""

import multiprocessing
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from octavo.testing.simulation.run import Outcome, simulate

_VOCAB_SIZE, _EOS_TOKEN_ID = 40, 3
_CHUNK = 4


@dataclass
class Campaign:
    """Sums up many runs."""

    failed: list[Outcome] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    num_runs: int = 0

    def add(self, outcome: Outcome) -> None:
        self.num_runs += 1
        self.counts.update(outcome.counts)
        self.virtual_s += outcome.virtual_s
        if outcome.failure is not None:
            self.failed.append(outcome)


@contextmanager
def fake_model() -> Iterator[Path]:
    """A model directory for simulations, the same wherever it lies."""
    with tempfile.TemporaryDirectory(prefix="octavo-") as parent:
        directory = Path(parent) / "model"
        directory.mkdir()
        config = {"vocab_size": _VOCAB_SIZE, "max_position_embeddings": 4096, "eos_token_id": _EOS_TOKEN_ID}
        (directory / "config.json").write_bytes(msgspec.json.encode(config))
        yield directory


def outcomes(seeds: Iterable[int], *, hashing: bool = False) -> Iterator[Outcome]:
    """Runs all seeds in fresh processes, as many at once as there are cores; outcomes come in the order of seeds."""
    # Not forked: a process with threads must not be.
    context = multiprocessing.get_context("spawn")
    with fake_model() as directory, context.Pool() as pool:
        yield from pool.imap(partial(simulate, directory=directory, hashing=hashing), seeds, _CHUNK)


def report(outcome: Outcome) -> str:
    """Describes a failed run, and how to see it again."""
    return f"{outcome.failure}\nseed {outcome.seed} failed; run it again: make simulate FIRST={outcome.seed} SEEDS=1"
