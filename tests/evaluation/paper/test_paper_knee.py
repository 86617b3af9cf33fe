"""The highest rate that is sustained, on planted curves."""

import pytest

from octavo.paper.lab import Curve, NoKneeError, sustained


def latency_of_a_queue(capacity: float, idle_s: float = 0.05) -> Curve:
    """That of one that is never done from `capacity` on."""
    return Curve(lambda rate: idle_s / (1 - rate / capacity) if rate < capacity else float("inf"))


@pytest.mark.parametrize("guess", [0.01, 1.9, 2.0, 40.0])
def test_the_knee_is_found_wherever_the_search_begins(guess: float) -> None:
    curve = latency_of_a_queue(2.0)
    # 0.05 / (1 - rate / 2) = 0.5
    expected = 1.8
    found = sustained(curve, guess, 0.5, 0.02)
    assert expected / 1.02 <= found <= expected
    assert curve.at(found) <= 0.5 < curve.at(found * 1.02)


def test_no_rate_is_tried_twice() -> None:
    tried: list[float] = []

    def latency(rate: float) -> float:
        tried.append(rate)
        return rate

    curve = Curve(latency)
    found = sustained(curve, 1.0, 3.0, 0.01)
    curve.at(found)
    assert len(tried) == len(set(tried)) == len(curve.points)
    assert len(tried) < 15


def test_a_finer_search_comes_closer() -> None:
    coarse, fine = (sustained(latency_of_a_queue(2.0), 1.0, 0.5, precision) for precision in (0.3, 0.001))
    assert coarse <= fine <= 1.8
    assert fine == pytest.approx(1.8, rel=0.001)


def test_a_curve_without_a_knee_is_an_error_that_says_so() -> None:
    with pytest.raises(NoKneeError, match=r"every rate from 1 to .* keeps the latency at most 0.5"):
        sustained(Curve(lambda rate: 0.1), 1.0, 0.5, 0.02)
    with pytest.raises(NoKneeError, match=r"no rate from 1 to .* keeps the latency at most 0.5"):
        sustained(Curve(lambda rate: 0.9), 1.0, 0.5, 0.02)
