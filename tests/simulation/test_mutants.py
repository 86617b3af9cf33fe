"""That the simulation can fail: with a safeguard taken out, or two, some run soon breaks."""

import os
from collections.abc import Iterator
from itertools import combinations, count, islice
from pathlib import Path
from random import Random

import pytest

from octavo.testing.depth import deep, deep_unless
from octavo.testing.simulation.run import simulate
from octavo.testing.simulation.scenario import draw

from . import draft_mutants, request_mutants, worker_mutants
from .protocol_mutants import MUTANTS, Mutant, Need

MAX_RUNS = 60
# Of the requests, of the blocks, of the workers, of memory, and of drafts: runs soon show these.
SHALLOW = (
    request_mutants.neither_aborts_nor_renewals_end_a_request,
    request_mutants.an_abort_leaks_blocks,
    worker_mutants.a_drain_is_told_as_a_loss,
    worker_mutants.steps_stay_large,
    draft_mutants.workers_keep_the_blocks_of_wrong_guesses,
)
NUM_PAIRS = 12
# Where neither side gives blocks back, both mean the same blocks, and no run could tell.
IN_AGREEMENT = {draft_mutants.wrong_guesses_keep_their_blocks, draft_mutants.workers_keep_the_blocks_of_wrong_guesses}
PAIRS = [pair for pair in combinations(MUTANTS, 2) if {mutant for mutant, _ in pair} != IN_AGREEMENT]
SOME_PAIRS = PAIRS if "OCTAVO_TEST_LONG" in os.environ else Random(7).sample(PAIRS, NUM_PAIRS)

Entry = tuple[Mutant, Need]


@pytest.mark.parametrize(
    "entry", deep_unless(lambda entry: entry[0] in SHALLOW, MUTANTS), ids=lambda entry: entry[0].__name__
)
def test_a_missing_safeguard_shows(entry: Entry, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry[0](monkeypatch)
    assert _shows([entry], directory), f"{MAX_RUNS} runs are clean without this safeguard"


@pytest.mark.parametrize(
    "pair", deep(*SOME_PAIRS), ids=lambda pair: "-and-".join(mutant.__name__ for mutant, _ in pair)
)
def test_nor_do_two_cover_for_each_other(
    pair: tuple[Entry, Entry], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mutant, _ in pair:
        mutant(monkeypatch)
    assert _shows(list(pair), directory), f"{MAX_RUNS} runs are clean without these two safeguards"


def _shows(entries: list[Entry], directory: Path) -> bool:
    return any(simulate(seed, directory).failure for seed in islice(_seeds_for(entries, directory), MAX_RUNS))


def _seeds_for(entries: list[Entry], directory: Path) -> Iterator[int]:
    return (seed for seed in count() if any(need(draw(seed, directory)) for _, need in entries))
