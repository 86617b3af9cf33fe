"""Every pair of mechanisms meets in some crowded history, and all that is wanted comes all the same.

Which mechanisms there are, and what it is to meet, `octavo.testing.oracles.mechanisms` says.
"""

import os

import pytest

from octavo.testing.cluster import write_fake_model
from octavo.testing.oracles.mechanisms import PAIRS, Mechanism, Meetings, Pair, label

from ..random_history import RandomHistory

M = Mechanism
IS_LONG = "OCTAVO_TEST_LONG" in os.environ
# In a long run: until all have met, and no longer than that.
NUM_HISTORIES = 250 if IS_LONG else 10
MAX_HISTORIES = 1600
IMPOSSIBLE: dict[Pair, str] = {
    (M.BEAM, M.FOLLOWER): "beams of a search differ in their tokens, so none follows another",
    (M.BEAM, M.DRAFT): "beams have no drafts",
    (M.SWAP, M.OVERTAKING): "who is swapped out is in no queue, and nobody is admitted where anybody is",
}


@pytest.fixture(scope="module")
def meetings(tmp_path_factory: pytest.TempPathFactory) -> Meetings:
    directory = write_fake_model(tmp_path_factory.mktemp("histories") / "model")
    meetings = Meetings()
    for seed in range(MAX_HISTORIES if IS_LONG else NUM_HISTORIES):
        if seed >= NUM_HISTORIES and meetings.missing <= IMPOSSIBLE.keys():
            break
        try:
            RandomHistory(directory, seed, meetings).run()
        except Exception as error:
            raise AssertionError(f"the history of seed {seed} went wrong") from error
    print(meetings.matrix(IMPOSSIBLE))
    return meetings


def test_every_pair_that_can_meet_does(meetings: Meetings) -> None:
    missing = meetings.missing - IMPOSSIBLE.keys()
    if IS_LONG:
        assert not sorted(map(label, missing)), "these never met"
    # In a short run each meets some other.
    met = {mechanism for pair in set(PAIRS) - missing for mechanism in pair}
    assert met == set(Mechanism)


def test_none_meets_that_cannot(meetings: Meetings) -> None:
    assert not [f"{label(pair)}: {why}" for pair, why in IMPOSSIBLE.items() if meetings.counts[pair]]
