"""Guesses of a draft model are asked for where tokens come faster with all that they take."""

import pytest

from octavo.scheduler.core.speculation.asking import Asking, AskingPrices, ask
from octavo.scheduler.core.speculation.pricing import Prices
from octavo.wire.costs import RowCost


def prices(row_s: float = 0.001) -> Prices:
    """Of steps that take 0.1 s, and so much longer for each further row."""
    return Prices([RowCost(rows, 0.1 + (rows - 1) * row_s) for rows in (1, 64)])


def asking(guess_s: float) -> AskingPrices:
    """Of guesses that take as long of 16 sequences as of one."""
    return AskingPrices([RowCost(1, guess_s), RowCost(16, guess_s)])


def rate(found: Asking, chance: float, guess_s: float, row_s: float, num_decodes: int) -> float:
    count = len(found.places)
    gain = count * sum(chance**depth for depth in range(1, found.depth + 1))
    taken = 0.101 + (num_decodes - 1) * row_s + found.depth * guess_s + count * found.depth * row_s
    return (num_decodes + gain) / taken


@pytest.mark.parametrize("num_decodes", [1, 3, 8])
@pytest.mark.parametrize("chance", [0.3, 0.7, 0.95])
@pytest.mark.parametrize("guess_s", [0.002, 0.02, 0.06])
@pytest.mark.parametrize("row_s", [0.0005, 0.02])
def test_the_rate_is_the_best_of_all_depths_and_none(
    num_decodes: int, chance: float, guess_s: float, row_s: float
) -> None:
    found = ask(prices(row_s), asking(guess_s), num_decodes * [12 * [chance]], num_decodes, 0)
    everybody = list(range(num_decodes))
    others = [Asking(everybody, depth) for depth in range(1, 9)]
    best = max(rate(each, chance, guess_s, row_s, num_decodes) for each in others)
    plain = num_decodes / (0.1 + (num_decodes - 1) * row_s)
    if found.depth:
        assert rate(found, chance, guess_s, row_s, num_decodes) >= 0.999 * best > plain
    else:
        assert best <= 1.03 * plain


def test_those_are_asked_for_that_are_believed() -> None:
    found = ask(prices(0.02), asking(0.002), [4 * [0.05], 4 * [0.9], 4 * [0.05], 4 * [0.8]], 4, 0)
    assert sorted(found.places) == [1, 3]


def test_nothing_is_asked_for_where_nobody_may_be_asked() -> None:
    assert ask(prices(), asking(0.001), [], 3, 0) == Asking([], 0)
    assert ask(prices(), asking(0.001), [[]], 3, 0) == Asking([], 0)


def test_more_sequences_than_were_measured_take_longer_in_proportion() -> None:
    assert asking(0.01).seconds(1) == asking(0.01).seconds(12) == 0.01
    assert asking(0.01).seconds(48) == pytest.approx(0.03)


def test_what_guesses_take_is_learnt_from_answers() -> None:
    """A single long time counts little, whatever it was."""
    learnt = asking(0.01)
    learnt.answered(1, 4, 10_000_000)
    assert 0.01 < learnt.seconds(1) < 0.013
    for _ in range(300):
        learnt.answered(1, 4, 80_000)
    assert learnt.seconds(1) == pytest.approx(0.02, rel=0.01)


def test_a_worker_that_has_measured_nothing_has_no_price() -> None:
    unknown = AskingPrices([RowCost(1, 0.0)])
    unknown.answered(1, 1, 1)
    assert not unknown.is_known
