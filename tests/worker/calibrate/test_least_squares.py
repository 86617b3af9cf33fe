"""Costs from what was measured: never negative, and right where the measurements can be explained."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.wire.costs import attended_pairs
from octavo.worker.calibrate.fit import Numbers, least_costs

Rows = list[tuple[float, ...]]


def fit(rows: Rows, seconds: list[float]) -> list[float]:
    costs: list[float] = least_costs(np.array(rows, dtype=np.float64).reshape(-1, 3), np.array(seconds)).tolist()
    return costs


chunks = st.tuples(st.sampled_from([0, 64, 512, 4096]), st.sampled_from([16, 64, 256, 1024]))


@given(st.lists(chunks, min_size=4, max_size=8, unique=True), st.tuples(*[st.integers(0, 1000)] * 3))
def test_a_fit_explains_samples_that_can_be_explained(
    found: list[tuple[int, int]], thousandths: tuple[int, int, int]
) -> None:
    costs = np.array(thousandths) * (1e-3, 1e-6, 1e-10)
    rows = np.array([(1.0, count, attended_pairs(context, count, [0])) for context, count in found])
    seconds = rows @ costs
    assert rows @ least_costs(rows, seconds) == pytest.approx(seconds, abs=1e-6 * seconds.max())


quantities = st.tuples(st.just(1.0), st.floats(0.0, 1e4), st.floats(0.0, 1e8))


@given(st.lists(st.tuples(quantities, st.floats(0.0, 10.0)), max_size=8))
def test_no_cost_is_negative_whatever_the_samples(found: list[tuple[tuple[float, float, float], float]]) -> None:
    assert min(fit([row for row, _ in found], [seconds for _, seconds in found])) >= 0.0


@given(st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_nothing_else_without_a_negative_cost_has_a_smaller_sum_of_squares(columns: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, seconds = random.standard_normal((20, columns)), random.standard_normal(20)

    def rest(costs: Numbers) -> float:
        return float(np.square(rows @ costs - seconds).sum())

    found = least_costs(rows, seconds)
    least = rest(found)
    nearby = np.abs(found + 0.1 * random.standard_normal((100, columns)) * random.integers(0, 2, (100, columns)))
    assert all(rest(costs) >= least * (1 - 1e-9) for costs in (*nearby, np.zeros(columns)))


def test_where_larger_steps_took_less_time_only_the_step_costs() -> None:
    assert fit([(1.0, 16.0, 136.0), (1.0, 64.0, 2080.0)], [2.0, 1.0]) == pytest.approx([1.5, 0.0, 0.0])


def test_of_quantities_that_nothing_tells_apart_one_has_the_cost_of_all() -> None:
    found = fit([(1.0, 16.0, 32.0), (1.0, 64.0, 128.0), (1.0, 128.0, 256.0)], [17.0, 65.0, 129.0])
    assert sorted(found)[0] == 0.0
    assert found[1] + 2 * found[2] == pytest.approx(1.0)


def test_of_nothing_nothing_is_learned() -> None:
    assert fit([], []) == [0.0, 0.0, 0.0]
