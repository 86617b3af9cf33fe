"""The chance of a guess follows what became of others of its kind, and of its sequence."""

import pytest

from octavo.scheduler.core.speculation.acceptance import HIGHEST_CHANCE, LONGEST_COPY, Acceptance, TrackRecord


def trusted() -> TrackRecord:
    """A sequence whose guesses come true as often as others of their kind."""
    return TrackRecord(6.0, 6.0)


def chance(acceptance: Acceptance, length: int, record: TrackRecord | None = None) -> float:
    chances = acceptance.chances(length, 1, record or trusted())
    return chances[0] if chances else 0.0


def taught(length: int, came_true: bool, times: int) -> Acceptance:
    """By as many sequences, so that no single one is known."""
    acceptance = Acceptance()
    for _ in range(times):
        acceptance.note(length, TrackRecord(), came_true)
    return acceptance


def test_a_longer_match_promises_more_before_anything_is_known() -> None:
    chances = [chance(Acceptance(), length) for length in (1, 3, 8, 16, 64)]
    assert chances == sorted(set(chances))


def test_guesses_of_a_kind_are_worth_what_those_before_them_were() -> None:
    before = chance(Acceptance(), 4)
    good, bad = chance(taught(4, True, 200), 4), chance(taught(4, False, 200), 4)
    assert bad < 0.1 < before < 0.6 < good


def test_guesses_are_told_apart_by_the_length_of_their_match() -> None:
    acceptance = taught(4, False, 200)
    assert chance(acceptance, 16) == chance(Acceptance(), 16)


def test_deeper_guesses_have_the_chances_of_longer_matches() -> None:
    acceptance = taught(10, False, 10)
    chances = acceptance.chances(8, 3, trusted())
    assert chances == [chance(acceptance, length) for length in (8, 9, 10)]
    assert chances[2] < chances[0]


def test_a_sequence_whose_guesses_fail_is_soon_given_little_chance_and_others_are_not() -> None:
    acceptance, failing, other = taught(8, True, 500), trusted(), trusted()
    before = chance(acceptance, 8, other)
    for _ in range(12):
        acceptance.note(8, failing, False)
    assert chance(acceptance, 8, failing) < 0.3 * before
    assert chance(acceptance, 8, other) == pytest.approx(before, rel=0.05)


def test_a_new_sequence_is_given_less_chance_than_its_guesses_deserve_until_they_have_come_true() -> None:
    acceptance, record = taught(8, True, 500), TrackRecord()
    first = chance(acceptance, 8, record)
    for _ in range(30):
        acceptance.note(8, record, True)
    assert first < 0.7 < 0.9 < chance(acceptance, 8, record)


def test_a_sequence_that_failed_is_believed_again_once_its_guesses_come_true() -> None:
    acceptance, record = taught(8, True, 500), TrackRecord()
    for _ in range(100):
        acceptance.note(8, record, False)
    low = chance(acceptance, 8, record)
    for _ in range(40):
        acceptance.note(8, record, True)
    assert low < 0.05
    assert chance(acceptance, 8, record) > 0.6


def test_no_guess_is_certain() -> None:
    acceptance, record = taught(8, True, 10_000), TrackRecord()
    for _ in range(100):
        acceptance.note(8, record, True)
    assert chance(acceptance, 8, record) == HIGHEST_CHANCE


def test_what_was_seen_long_ago_is_forgotten() -> None:
    acceptance = taught(8, True, 100_000)
    for _ in range(5000):
        acceptance.note(8, TrackRecord(), False)
    assert chance(acceptance, 8) < 0.2


def test_guesses_that_all_but_never_come_true_are_left_out() -> None:
    acceptance = taught(3, False, 2000)
    assert acceptance.chances(3, 10, TrackRecord()) == []
    assert len(acceptance.chances(32, 10, trusted())) == 10


def test_the_longest_copy_has_chances_for_the_longest_draft() -> None:
    assert len(taught(LONGEST_COPY, True, 100).chances(LONGEST_COPY, 100, trusted())) == 100
