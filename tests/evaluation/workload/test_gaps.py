import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.workload.measures import Gaps, Spread, percentile

TIMES = st.lists(st.floats(1e-6, 1e5), min_size=1, max_size=50)
SHARES = st.floats(0, 100)


def counted(values: list[float]) -> Gaps:
    gaps = Gaps()
    for value in values:
        gaps.add(value)
    return gaps


@given(TIMES, SHARES)
def test_percentiles_are_within_a_hundredth_of_the_exact_ones(values: list[float], q: float) -> None:
    assert counted(values).percentile(q) == pytest.approx(percentile(sorted(values), q), rel=0.01)


@given(TIMES)
def test_mean_and_maximum_are_exact(values: list[float]) -> None:
    spread, exact = counted(values).spread(), Spread.of(values)
    assert spread is not None
    assert exact is not None
    assert spread.mean == pytest.approx(exact.mean)
    assert spread.max == exact.max


@given(TIMES, TIMES)
def test_merged_counts_are_those_of_all_values(some: list[float], others: list[float]) -> None:
    merged, whole = counted(some), counted(some + others)
    merged.merge(counted(others))
    assert merged.count == whole.count == len(some) + len(others)
    assert merged.mean == pytest.approx(whole.mean)
    assert [merged.percentile(q) for q in (0, 50, 99, 100)] == [whole.percentile(q) for q in (0, 50, 99, 100)]


def test_a_time_may_be_counted_many_times_at_once() -> None:
    gaps = Gaps()
    gaps.add(0.010, count=99)
    gaps.add(1.0)
    assert gaps.count == 100
    assert gaps.mean == pytest.approx(0.0199)
    assert gaps.percentile(50) == pytest.approx(0.010, rel=0.01)


def test_no_time_at_all_is_counted_too() -> None:
    assert counted([0.0]).percentile(50) == 0.0
    assert counted([0.0, 1.0]).percentile(0) == pytest.approx(0.0, abs=1e-8)


def test_thirty_years_have_a_bucket() -> None:
    assert counted([9e8]).percentile(50) == pytest.approx(9e8, rel=0.01)


def test_nothing_counted_has_no_percentile() -> None:
    assert Gaps().spread() is None
    assert Spread.of([]) is None
    with pytest.raises(ValueError, match="no values"):
        Gaps().percentile(50)
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


@pytest.mark.parametrize("value", [-1e-9, -1.0, float("nan")])
def test_what_is_no_time_is_refused(value: float) -> None:
    gaps = Gaps()
    with pytest.raises(ValueError, match=r"negative|NaN"):
        gaps.add(value)
    assert gaps.count == 0


@pytest.mark.parametrize("q", [-1, 101])
def test_a_percentile_is_of_a_hundred(q: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 100"):
        percentile([1.0], q)


def test_a_percentile_between_neighbours_lies_on_the_line() -> None:
    assert percentile([0.0, 10.0], 25) == 2.5
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert percentile([1.0, 2.0, 3.0], 100) == 3.0


def test_a_spread_does_not_depend_on_the_order() -> None:
    values = [random.Random(0).random() for _ in range(101)]
    spread = Spread.of(values)
    assert spread == Spread.of(sorted(values))
    assert spread is not None
    assert spread.p50 == sorted(values)[50]
