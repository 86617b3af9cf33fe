"""Guesses of draft models are kept while they may come true, and tokens show how often they do."""

from itertools import pairwise

from octavo.scheduler.core.sequence import RequestGroup, Sequence
from octavo.scheduler.core.speculation.draft import DraftSource
from octavo.scheduler.core.speculation.model_guesses import ModelGuesses
from octavo.testing.cluster import make_request


def make_group() -> tuple[RequestGroup, Sequence]:
    group = RequestGroup(make_request("r", 4, 100_000), 0.0, (0.0, 0), frontend_id=1)
    return group, group.sequences[0]


def drafted(guesses: ModelGuesses, sequence: Sequence, most: int = 8) -> list[int]:
    draft = guesses.draft("m", sequence, most)
    assert draft is None or draft.source is DraftSource.MODEL
    return draft.token_ids if draft else []


def test_what_comes_true_is_gone_on_from() -> None:
    _, sequence = make_group()
    guesses = ModelGuesses()
    guesses.take("m", sequence, [7, 8, 9])
    assert drafted(guesses, sequence) == [7, 8, 9]
    assert drafted(guesses, sequence, 2) == [7, 8]
    sequence.append(7)
    assert drafted(guesses, sequence) == [8, 9]
    sequence.append(5)
    sequence.append(9)
    assert drafted(guesses, sequence) == []


def test_chances_follow_what_came_true_at_each_depth() -> None:
    """The first guess always does, the second never."""
    _, sequence = make_group()
    guesses = ModelGuesses()
    for _ in range(200):
        guesses.take("m", sequence, [7, 8])
        sequence.append(7)
        sequence.append(9)
    first, second = guesses.chances("m", sequence, 2)
    assert first > 0.95
    assert second < 0.05
    _, other = make_group()
    assert guesses.chances("m", other, 1)[0] > 0.9
    assert 0.5 < guesses.chances("another model", other, 1)[0] < 0.7


def test_a_sequence_that_is_hard_to_guess_is_believed_less_than_others_and_again_later() -> None:
    _, easy = make_group()
    _, hard = make_group()
    guesses = ModelGuesses()
    for _ in range(60):
        for sequence, guess in ((easy, 7), (hard, 8)):
            guesses.take("m", sequence, [guess])
            sequence.append(7)
    believed = guesses.chances("m", easy, 1)[0]
    assert sum(guesses.chances("m", hard, 1)) < 0.2 * believed
    for _ in range(300):
        hard.append(7)
    assert guesses.chances("m", hard, 1)[0] > 0.4 * believed


def test_a_sequence_that_is_believed_again_in_vain_is_so_after_twice_as_long_the_next_time() -> None:
    _, sequence = make_group()
    guesses = ModelGuesses()
    forgiven = []
    for place in range(1700):
        chances = guesses.chances("m", sequence, 1)
        if chances and chances[0] > 0.02:
            forgiven.append(place)
            guesses.take("m", sequence, [8])
        sequence.append(7)
    later = [place for previous, place in pairwise(forgiven) if place > previous + 100]
    assert len(later) == 2
    assert 256 <= later[0] <= 300
    assert 512 <= later[1] - later[0] <= 560


def test_nothing_is_kept_of_a_group_that_has_ended() -> None:
    group, sequence = make_group()
    guesses = ModelGuesses()
    guesses.take("m", sequence, [7])
    guesses.forget(group)
    assert drafted(guesses, sequence) == []
    assert guesses.tracks == {}
