"""Guesses get the rows that they are worth by a worker's measured costs, and sequences wait where that pays."""

import itertools
import random
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import pytest

from octavo.scheduler.core.speculation.pricing import Decision, Offer, Pace, Prices, always, decide
from octavo.wire.costs import RowCost
from octavo.wire.steps import StepTimes

# As of a CPU: few rows cost hardly more than one, then each adds as much as the one before it.
COSTS = {1: 0.011, 4: 0.0115, 16: 0.015, 64: 0.040}
# A step of so many rows costs in proportion: nothing is gained by any row that may be in vain.
LINEAR = {1: 0.001, 64: 0.064}


def prices(costs: dict[int, float], gap_s: float = 0.0005) -> Prices:
    made = Prices([RowCost(rows, seconds) for rows, seconds in costs.items()])
    for _ in range(20):
        made.answered_alone(gap_s + 0.006, StepTimes(1000, 4000, 1000))
    return made


def good(depth: int = 8, *, in_flight: bool = False, chance: float = 0.9) -> Offer:
    return Offer(depth * [chance], in_flight)


def rate(costs: Prices, offers: list[Offer], counts: tuple[int, ...], num_decodes: int) -> float:
    tokens = num_decodes + sum(sum(offer.gains()[:count]) for offer, count in zip(offers, counts, strict=True))
    return tokens / (costs.seconds(num_decodes + sum(counts)) + costs.gap_s)


@pytest.mark.parametrize(
    ("rows", "seconds"), [(1, 0.011), (4, 0.0115), (10, 0.01325), (16, 0.015), (64, 0.040), (160, 0.090)]
)
def test_a_step_costs_in_proportion_between_what_was_measured_and_beyond(rows: int, seconds: float) -> None:
    assert prices(COSTS).seconds(rows) == pytest.approx(seconds)


def test_one_measured_size_stands_for_all() -> None:
    costs = prices({4: 0.01})
    assert [costs.seconds(rows) for rows in (1, 4, 9)] == [0.01, 0.01, 0.01]


def test_fewer_rows_than_were_measured_cost_as_much_as_the_fewest() -> None:
    assert prices({4: 0.01, 8: 0.02}).seconds(2) == 0.01


def test_without_measured_costs_nothing_pays() -> None:
    unknown = prices({})
    assert not unknown.may_pay(1, 0)
    assert decide(unknown, [good()], 1, 0, 100) == Decision([0], Pace.GO)


@pytest.mark.parametrize(
    "measured",
    [
        [RowCost(1, 0.0)],
        [RowCost(1, 0.0), RowCost(2, 0.0)],
        [RowCost(4, 0.02), RowCost(1, 0.01)],
        [RowCost(1, 0.02), RowCost(4, 0.01)],
        [RowCost(1, 0.01), RowCost(1, 0.02)],
    ],
)
def test_costs_that_no_worker_can_have_measured_do_no_harm(measured: list[RowCost]) -> None:
    costs = Prices(measured)
    costs.answered(1, 1, taking(0.01))
    costs.answered(1, 4, taking(0.01))
    counts = decide(costs, [good()], 1, 0, 100).counts
    assert counts == ([8] if costs.is_known else [0])
    if costs.is_known:
        assert 0.0 < costs.seconds(1) <= costs.seconds(2) <= costs.seconds(9)


def test_a_sequence_alone_gets_rows_for_its_guesses_and_waits() -> None:
    decision = decide(prices(COSTS), [good()], 1, 0, 100)
    assert decision == Decision([8], Pace.ALL)


def test_guesses_that_hardly_ever_come_true_get_no_row_and_nobody_waits() -> None:
    assert decide(prices(COSTS), [good(chance=0.05)], 1, 0, 100) == Decision([0], Pace.GO)


def test_where_each_row_costs_as_much_as_any_other_nothing_pays() -> None:
    linear = prices(LINEAR)
    assert not linear.may_pay(8, 0)
    assert decide(linear, 8 * [good(chance=0.98)], 8, 0, 1000) == Decision([0] * 8, Pace.GO)


def test_fewer_guesses_pay_the_more_sequences_decode_and_none_in_a_full_step() -> None:
    costs = prices(COSTS)
    per_sequence = [sum(decide(costs, n * [good()], n, 0, 10_000).counts) / n for n in (1, 4, 16, 64, 1024)]
    assert per_sequence == sorted(per_sequence, reverse=True)
    assert per_sequence[0] == 8
    assert per_sequence[-1] == 0
    assert [costs.may_pay(n, 0) for n in (1, 4, 16, 1024)] == [True, True, True, False]


def test_whoever_is_promised_nothing_by_the_best_guesses_is_not_asked_in_vain() -> None:
    """`may_pay` is right wherever it says no: the best guesses there are get no row."""
    for costs in (COSTS, LINEAR):
        known = prices(costs, gap_s=0.0)
        for n in (1, 2, 8, 64, 256, 1024):
            if not known.may_pay(n, 0):
                best = decide(known, n * [good(32, chance=0.98)], n, 0, 100_000)
                assert best.pace is Pace.GO


@pytest.mark.parametrize("seed", range(200))
def test_no_guess_gets_a_row_that_is_not_worth_one(seed: int) -> None:
    source = random.Random(seed)
    costs = prices(source.choice((COSTS, LINEAR)), gap_s=source.choice((0.0, 0.001, 0.05)))
    num_decodes, other_rows = source.randrange(1, 80), source.choice((0, 0, 30))
    offers = [
        Offer([1 - source.random() ** 2 for _ in range(source.randrange(1, 9))], source.random() < 0.5)
        for _ in range(source.randrange(1, num_decodes + 1))
    ]
    worth = costs.worth(num_decodes, other_rows)
    decision = decide(costs, offers, num_decodes, other_rows, 10_000)
    spent = [gain for offer, n in zip(offers, decision.counts, strict=True) for gain in offer.gains()[:n]]
    assert all(gain >= worth for gain in spent)
    # So all that is not worth it may as well never be proposed.
    cut = [Offer(_first(offer.chances, worth), offer.in_flight) for offer in offers]
    assert decide(costs, cut, num_decodes, other_rows, 10_000) == decision


def _first(chances: Sequence[float], worth: float) -> list[float]:
    return [chance for chance, gain in zip(chances, accumulate(chances, mul), strict=True) if gain >= worth]


@pytest.mark.parametrize("seed", range(30))
def test_no_other_numbers_of_guesses_would_bring_tokens_faster(seed: int) -> None:
    source = random.Random(seed)
    offers = [Offer([source.random() for _ in range(source.randrange(1, 4))]) for _ in range(3)]
    num_decodes = source.randrange(3, 30)
    costs = prices(COSTS, gap_s=0.0001)
    decision = decide(costs, offers, num_decodes, 0, 100)
    tried = itertools.product(*(range(len(offer.chances) + 1) for offer in offers))
    best = max(tried, key=lambda counts: rate(costs, offers, counts, num_decodes) if any(counts) else 0.0)
    plain = num_decodes / costs.seconds(num_decodes)
    if decision.pace is Pace.ALL:
        reached = rate(costs, offers, tuple(decision.counts), num_decodes)
        assert reached == pytest.approx(rate(costs, offers, best, num_decodes))
        assert reached > plain
    elif decision.pace is Pace.GO:
        assert rate(costs, offers, best, num_decodes) < 1.03 * plain


def test_better_guesses_come_first_where_not_all_have_room() -> None:
    offers = [good(4, chance=0.5), good(4, chance=0.95), good(4, chance=0.7)]
    assert decide(prices(COSTS), offers, 3, 0, 5).counts == [0, 4, 1]
    assert decide(prices(COSTS), offers, 3, 0, 0) == Decision([0, 0, 0], Pace.GO)


def test_equal_guesses_are_shared_out_in_order() -> None:
    assert decide(prices(COSTS), 3 * [good(1)], 3, 0, 2).counts == [1, 1, 0]


def test_the_first_guess_of_a_sequence_with_a_token_in_flight_takes_no_row() -> None:
    decision = decide(prices(COSTS), [good(5, in_flight=True)], 1, 0, 100)
    assert decision == Decision([4], Pace.ALL)
    assert Offer([0.5, 0.8], in_flight=True).gains() == [pytest.approx(0.4)]


def test_a_single_guess_for_the_token_in_flight_is_not_waited_for() -> None:
    assert decide(prices(COSTS), [good(1, in_flight=True)], 1, 0, 100) == Decision([0], Pace.GO)


def test_nobody_waits_where_a_worker_would_lose_more_than_guesses_bring() -> None:
    assert decide(prices(COSTS, gap_s=0.001), [good(2)], 1, 0, 100).pace is Pace.ALL
    assert decide(prices(COSTS, gap_s=0.1), [good(2)], 1, 0, 100).pace is Pace.GO


def test_only_those_with_guesses_wait_where_others_keep_a_distant_worker_busy() -> None:
    flat = {1: 0.010, 64: 0.012}
    offers = 8 * [good(16, chance=0.95)]
    assert decide(prices(flat, gap_s=0.0001), offers, 16, 0, 1000).pace is Pace.ALL
    assert decide(prices(flat, gap_s=0.05), offers, 16, 0, 1000).pace is Pace.DRAFTERS
    # If all have guesses, nobody is left to keep it busy.
    assert decide(prices(flat, gap_s=0.5), offers, 8, 0, 1000).pace is Pace.GO


def test_rows_beside_a_prompt_are_worth_what_tokens_cost_without_it() -> None:
    """However slow the prompt makes the step, a row is spent if it costs less there than its tokens do elsewhere."""
    costs = prices({1: 0.010, 64: 0.011, 128: 0.75, 512: 5.0})
    assert decide(costs, [good()], 1, 0, 100).counts == [8]
    assert decide(costs, [good()], 1, 200, 100) == Decision([0], Pace.GO)
    assert not costs.may_pay(1, 200)
    cheaper = prices({1: 0.010, 64: 0.011, 512: 0.5})
    assert cheaper.may_pay(1, 200)
    assert decide(cheaper, [good()], 1, 200, 100) == Decision([8], Pace.ALL)


def test_a_single_late_answer_does_not_change_what_waiting_costs() -> None:
    costs = prices(COSTS, gap_s=0.002)
    costs.answered_alone(5.0, StepTimes(0, 0, 0))
    assert costs.gap_s == pytest.approx(0.002)


def test_a_worker_that_says_it_took_longer_than_its_answer_lets_nothing_be_lost() -> None:
    costs = prices(COSTS)
    for _ in range(20):
        costs.answered_alone(0.001, StepTimes(1000, 1000, 1000))
    assert costs.gap_s == 0.0


def test_unpriced_guesses_are_checked_up_to_a_number_whatever_they_promise() -> None:
    offers = [good(8, chance=0.01), good(2), good(3, in_flight=True), good(1, in_flight=True)]
    assert always(4, offers) == Decision([4, 2, 2, 0], Pace.DRAFTERS)
    assert always(4, []) == Decision([], Pace.GO)


def taking(seconds: float) -> StepTimes:
    return StepTimes(0, round(seconds * 1e6), 0)


def spent(costs: Prices, num_decodes: int = 64) -> int:
    offers = num_decodes * [good(chance=0.8)]
    return sum(decide(costs, offers, num_decodes, 0, 10_000).counts)


def test_more_guesses_pay_where_sequences_take_longer_than_measured_for_their_context() -> None:
    costs = prices(COSTS)
    before = spent(costs)
    for _ in range(200):
        costs.answered(64, 64, taking(0.160))
    assert costs.seconds(64) == pytest.approx(0.160, rel=0.02)
    assert costs.seconds(1) == pytest.approx(0.011 + 0.120 / 64, rel=0.05)
    assert spent(costs) > before + 64


def test_it_is_seen_after_a_few_steps_that_guesses_may_pay_now() -> None:
    costs = prices(COSTS)
    assert not costs.may_pay(256, 0)
    for _ in range(40):
        costs.answered(256, 256, taking(0.280))
    assert costs.may_pay(256, 0)
    for _ in range(400):
        costs.answered(256, 256, taking(0.140))
        costs.may_pay(256, 0)
    assert not costs.may_pay(256, 0)


@pytest.mark.parametrize("rows", [1, 3, 4, 15, 16, 60, 64, 100])
def test_each_row_lengthens_a_step_by_as_much_as_the_curve_says(rows: int) -> None:
    for costs in (prices(COSTS), prices({4: 0.01, 8: 0.02, 12: 0.021}), prices({4: 0.01})):
        for number, (least_s, grown_s) in enumerate(itertools.islice(costs.growth(rows), 80), 1):
            assert grown_s == pytest.approx(costs.further_seconds(rows, number))
            assert least_s == costs.least_growth(rows + number - 1)


def test_fewer_guesses_pay_where_their_rows_take_longer_than_measured_until_that_is_long_ago() -> None:
    costs = prices(COSTS)
    for _ in range(200):
        costs.answered(16, 16, taking(0.015))
    before = spent(costs, 16)
    for _ in range(200):
        costs.answered(16, 64, taking(0.015 + 3 * 0.025))
    assert costs.row_factor == pytest.approx(3.0, rel=0.05)
    assert spent(costs, 16) < before / 2
    for _ in range(5000):
        costs.answered(16, 16, taking(0.015))
    assert spent(costs, 16) == before


def test_a_step_that_was_held_up_changes_little() -> None:
    costs = prices(COSTS)
    costs.answered(64, 64, taking(60.0))
    costs.answered(16, 64, taking(60.0))
    assert costs.seconds(64) < 0.045
    assert costs.row_factor < 3.5


def test_answers_of_a_worker_that_measured_nothing_say_nothing() -> None:
    unknown = prices({})
    unknown.answered(1, 1, taking(0.01))
    assert not unknown.is_known


def test_steps_whose_rows_cost_nothing_by_the_curve_leave_it_as_it_is() -> None:
    flat = prices({1: 0.01, 64: 0.01})
    for _ in range(10_000):
        flat.answered(1, 9, taking(0.01))
    assert flat.row_factor == 1.0
    assert decide(flat, [good()], 1, 0, 100).counts == [8]
