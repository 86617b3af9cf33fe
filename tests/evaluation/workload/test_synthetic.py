from dataclasses import replace
from itertools import islice, pairwise
from random import Random
from statistics import mean, stdev

import pytest

from octavo.workload.synthetic import DATASETS, Arrivals, AtOnce, Dataset, Fixed, Poisson, Regular, Workload

SHAREGPT = Workload(DATASETS["sharegpt"], Poisson(2.0), num_requests=200)


def times(arrivals: Arrivals, count: int) -> list[float]:
    return list(islice(arrivals.times(Random(0)), count))


def test_poisson_arrivals_are_exponential_gaps_at_the_rate() -> None:
    gaps = [later - earlier for earlier, later in pairwise(times(Poisson(4.0), 20_000))]
    assert min(gaps) >= 0
    assert mean(gaps) == pytest.approx(0.25, rel=0.03)
    assert stdev(gaps) == pytest.approx(0.25, rel=0.03)


def test_regular_arrivals_are_equally_far_apart() -> None:
    assert times(Regular(4.0), 4) == [0.0, 0.25, 0.5, 0.75]


def test_arrivals_at_once_are_at_the_start() -> None:
    assert times(AtOnce(), 3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("arrivals", [Poisson, Regular])
def test_a_rate_that_cannot_be_is_refused(arrivals: type[Poisson | Regular], rate: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        arrivals(rate)


def test_a_seed_gives_the_same_jobs_and_another_seed_others() -> None:
    assert SHAREGPT.jobs(7) == SHAREGPT.jobs(7)
    assert SHAREGPT.jobs(7) != SHAREGPT.jobs(8)


def test_the_jobs_of_a_seed_never_change() -> None:
    first = SHAREGPT.jobs(0)[0]
    assert (first.prompt_tokens, first.output_tokens, round(first.arrival_s, 6)) == (33, 220, 0.920057)


def test_another_rate_changes_only_when_jobs_come() -> None:
    slow, fast = SHAREGPT.jobs(0), replace(SHAREGPT, arrivals=Poisson(4.0)).jobs(0)
    assert [replace(each, arrival_s=each.arrival_s / 2) for each in slow] == fast


def test_other_lengths_or_prefixes_change_neither_arrivals_nor_each_other() -> None:
    alpaca = replace(SHAREGPT, dataset=DATASETS["alpaca"], prefix_tokens=80, num_prefixes=3).jobs(0)
    plain = replace(SHAREGPT, prefix_tokens=80, num_prefixes=3).jobs(0)
    assert [each.arrival_s for each in alpaca] == [each.arrival_s for each in SHAREGPT.jobs(0)]
    assert [each.prefix for each in alpaca] == [each.prefix for each in plain]
    assert [each.prompt_tokens - 80 for each in plain] == [each.prompt_tokens for each in SHAREGPT.jobs(0)]


def test_jobs_come_until_the_time_is_over() -> None:
    jobs = replace(SHAREGPT, num_requests=None, seconds=600.0).jobs(0)
    assert 590 < jobs[-1].arrival_s < 600
    assert len(jobs) == pytest.approx(1200, rel=0.1)


def test_whichever_end_is_first_counts() -> None:
    assert len(replace(SHAREGPT, seconds=1e6).jobs(0)) == 200
    assert len(replace(SHAREGPT, seconds=1.0).jobs(0)) < 20


def test_every_prefix_is_used_and_stands_before_the_drawn_prompt() -> None:
    dataset = Dataset("fixed", Fixed(20), Fixed(5))
    jobs = Workload(dataset, AtOnce(), num_requests=50, prefix_tokens=80, num_prefixes=2).jobs(0)
    assert {each.prefix for each in jobs} == {"prefix-0", "prefix-1"}
    assert {(each.prompt_tokens, each.prefix_tokens) for each in jobs} == {(100, 80)}


def test_samples_and_beams_are_those_asked_for() -> None:
    assert {each.parallel for each in replace(SHAREGPT, n=4).jobs(0)} == {4}
    assert {each.beam_width for each in replace(SHAREGPT, beam_width=6, n=6).jobs(0)} == {6}


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"num_requests": None}, "without an end"),
        ({"num_requests": None, "seconds": 5.0, "arrivals": AtOnce()}, "without an end"),
        ({"num_requests": -1}, "negative"),
        ({"seconds": -1.0}, "negative"),
        ({"seconds": float("inf")}, "infinite"),
        ({"prefix_tokens": -1}, "cannot be"),
        ({"num_prefixes": 0}, "cannot be"),
    ],
)
def test_what_has_no_end_or_cannot_be_is_refused(changed: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        replace(SHAREGPT, **changed)  # type: ignore[arg-type]
