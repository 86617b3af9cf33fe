"""The searches can fail: defects that were found late, planted again, are found by two of them.

One is a small scope, in seconds; a long run looks for each among the crowded histories too.
"""

import os
from pathlib import Path

import pytest
from tests.mutants.catalogue import load
from tests.mutants.in_process import plant

from octavo.testing.cluster import write_fake_model
from octavo.testing.oracles.mechanisms import Meetings

from ..random_history import RandomHistory
from .test_small_scope import ALL_SCOPES, search_of

MAX_HISTORIES = 120
# The mutants that make each up, and the scope that finds it.
DEFECTS: dict[str, tuple[list[str], str]] = {
    "blocks of a skipped chunk are shared": (
        ["skipped-chunks-shared", "skipped-chunks-cached", "tokens-of-skipped-chunks"],
        "a sequence that fails, two steps deep",
    ),
    "a wide group never comes back to a small step": (
        ["swap-in-only-in-one-step"],
        "steps that shrink under a wide group",
    ),
    "the swapped come back before the older": (
        ["swapped-before-recomputed", "recomputed-behind-all-swapped"],
        "one swapped and one recomputed",
    ),
    "pins starve an accepted request": (
        ["pins-starve-the-accepted", "pins-never-make-way"],
        "pins on what is left",
    ),
    "what fits no worker any more is never told": (["misfits-wait-for-ever"], "a smaller worker comes back"),
    "a large head idles small workers": (["head-idles-all-replicas"], "two sizes"),
}
MUTANTS = {mutant.name: mutant for mutant in load()}


@pytest.fixture(params=DEFECTS)
def scope(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Plants a defect."""
    names, scope = DEFECTS[request.param]
    for name in names:
        plant(MUTANTS[name], monkeypatch)
    return scope


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_fake_model(tmp_path / "model")


def test_a_small_scope_finds_it(scope: str, directory: Path) -> None:
    with pytest.raises(AssertionError):
        search_of(ALL_SCOPES[scope], directory).run()


@pytest.mark.usefixtures("scope")
@pytest.mark.skipif("OCTAVO_TEST_LONG" not in os.environ, reason="a long search")
def test_and_so_does_a_crowded_history(directory: Path) -> None:
    assert any(_goes_wrong(directory, seed) for seed in range(MAX_HISTORIES))


def _goes_wrong(directory: Path, seed: int) -> bool:
    try:
        RandomHistory(directory, seed, Meetings()).run()
    except AssertionError:
        return True
    return False
