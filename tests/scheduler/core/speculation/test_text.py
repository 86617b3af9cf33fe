"""Where the latest tokens of a sequence stood before in a text is found, as a search of all places would find it."""

import random
from array import array
from collections.abc import Callable

import pytest

from octavo.scheduler.core.speculation.text import LONGEST_MATCH, SHORTEST_MATCH, Match, Text, packed, tail

NO_MATCH = Match(0, 0)


def common(tokens: list[int], place: int, latest: list[int]) -> int:
    pairs = zip(reversed(tokens[:place]), reversed(latest), strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(place, len(latest)))


def searched(tokens: list[int], latest: list[int], beyond: int = 0) -> Match:
    """The longest match of all places, the latest of several."""
    found = max((Match(place, common(tokens, place, latest)) for place in range(1, len(tokens))), key=lambda m: m[::-1])
    return found if found.length >= max(SHORTEST_MATCH, beyond + 1) else NO_MATCH


def indexed(tokens: list[int]) -> Text:
    text = Text(tokens, most_scanned=0)
    assert text.index(len(tokens)) == len(tokens)
    return text


def scanned(tokens: list[int]) -> Text:
    assert not Text(tokens).is_behind
    return Text(tokens)


either = pytest.mark.parametrize("make", [indexed, scanned])


@either
@pytest.mark.parametrize("seed", range(8))
def test_the_longest_match_is_found_and_of_several_the_latest(seed: int, make: Callable[[list[int]], Text]) -> None:
    source = random.Random(seed)
    # Few runs stand in more places than are tried.
    tokens = [source.randrange(12) for _ in range(500)]
    text = make(tokens)
    found = 0
    for _ in range(100):
        latest = [source.randrange(12) for _ in range(source.randrange(SHORTEST_MATCH, LONGEST_MATCH))]
        if source.random() < 0.5:
            start = source.randrange(490)
            latest[-8:] = tokens[start : start + 8]
        expected = searched(tokens, latest)
        assert text.find(tail(latest)) == expected
        found += bool(expected.length)
    assert found > 30


@either
def test_whether_there_may_be_a_match_is_said_before(make: Callable[[list[int]], Text]) -> None:
    text = make([1, 2, 3, 4, 5])
    assert text.may_hold(packed([1, 2, 3]))
    assert text.may_hold(packed([8, 9, 2, 3, 4]))
    # A text that is scanned is known not to: it ends with these, or has them nowhere.
    assert [text.may_hold(packed(each)) for each in ([3, 4, 5], [1, 2, 4])] == 2 * [make is indexed]
    text.tokens.append(6)
    assert text.may_hold(packed([3, 4, 5]))


@either
def test_of_more_places_than_are_tried_a_late_one_is_found(make: Callable[[list[int]], Text]) -> None:
    text = make([1, 2, 3, 4] * 100)
    place, length = text.find(tail([9, 1, 2, 3]))
    assert text.tokens[place - 3 : place + 1] == [1, 2, 3, 4]
    assert length == 3
    assert place > 300


def test_a_text_indexed_in_pieces_while_it_grows_finds_what_one_indexed_at_once_does() -> None:
    source = random.Random(1)
    whole = [source.randrange(20) for _ in range(5000)]
    growing = Text([], most_scanned=0)
    for start in range(0, 5000, 50):
        growing.tokens.extend(whole[start : start + 50])
        while growing.index(source.randrange(1, 40)):
            pass
    at_once = indexed(whole)
    for _ in range(500):
        start = source.randrange(4900)
        latest = tail(whole[start : start + source.randrange(SHORTEST_MATCH, LONGEST_MATCH)])
        assert growing.find(latest) == at_once.find(latest)


def test_no_more_is_indexed_at_once_than_is_allowed() -> None:
    text = Text(list(range(1000)), most_scanned=0)
    assert [text.index(400) for _ in range(4)] == [400, 400, 200, 0]
    assert text.num_indexed == 1000


def test_what_is_not_indexed_yet_is_not_found() -> None:
    text = Text(list(range(1000)), most_scanned=0)
    text.index(500)
    assert text.find(tail([497, 498, 499])) == Match(500, 3)
    assert text.find(tail([498, 499, 500])) == NO_MATCH


def test_a_text_that_grows_too_long_to_be_scanned_is_indexed_from_its_beginning() -> None:
    source = random.Random(2)
    whole = [source.randrange(20) for _ in range(500)]
    text = Text([], most_scanned=200)
    for place, token in enumerate(whole):
        text.tokens.append(token)
        if place % 7 == 0:
            text.index(1 << 10)
            latest = whole[max(0, place - 9) : place + 1]
            assert len(latest) < SHORTEST_MATCH or text.find(tail(latest)) == searched(whole[: place + 1], latest)
    assert text.num_indexed > 490


def test_bytes_that_two_tokens_share_are_no_match() -> None:
    """Scanned are bytes; a token is four of them."""
    tokens = [1 << 8, 1 << 8, 1 << 8, 1 << 8, 0, 0, 0, 0, 7]
    text = scanned(tokens)
    assert text.find(tail([1, 1, 1])) == NO_MATCH
    assert text.find(tail([0, 0, 0])) == Match(8, 3)
    assert text.find(tail([1 << 8, 0, 0])) == Match(6, 3)


@either
def test_the_end_of_a_text_is_no_place_until_something_follows_it(make: Callable[[list[int]], Text]) -> None:
    tokens = [1, 2, 3, 4, 5]
    text = make(tokens)
    assert text.find(tail([3, 4, 5])) == NO_MATCH
    tokens.append(6)
    assert text.find(tail([3, 4, 5])) == Match(5, 3)


@either
def test_a_match_must_be_longer_than_the_one_there_is(make: Callable[[list[int]], Text]) -> None:
    text = make([9, 1, 2, 3, 4, 5, 6])
    latest = tail([8, 1, 2, 3, 4])
    assert text.find(latest, beyond=3) == Match(5, 4)
    assert text.find(latest, beyond=4) == NO_MATCH


@either
def test_a_match_is_compared_no_further_than_the_tokens_that_are_given(make: Callable[[list[int]], Text]) -> None:
    text = make(list(range(100)))
    assert text.find(tail(list(range(10, 50)))) == Match(50, 40)
    assert text.find(tail([47, 48, 49])) == Match(50, 3)


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3]])
@pytest.mark.parametrize("most_scanned", [0, 100])
def test_a_text_of_few_tokens_has_no_match(tokens: list[int], most_scanned: int) -> None:
    text = Text(tokens, most_scanned)
    text.index(10)
    assert text.find(tail([1, 2, 3])) == NO_MATCH


@pytest.mark.parametrize("most_scanned", [0, 100])
def test_an_array_of_tokens_is_a_text_as_well(most_scanned: int) -> None:
    text = Text(array("i", range(100)), most_scanned)
    text.index(100)
    assert text.find(tail([48, 49, 50])) == Match(51, 3)


def test_an_index_takes_at_most_twelve_bytes_for_a_token() -> None:
    source = random.Random(3)
    for length in (1 << 12, (1 << 12) + 1, 1 << 15, (1 << 15) + 1):
        assert indexed([source.randrange(50_000) for _ in range(length)]).num_bytes <= 12 * length
