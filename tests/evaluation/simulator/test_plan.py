"""The search of the smallest number of replicas, on loads of which the answer is known."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from octavo.simulator.engine import SimulationOutcome
from octavo.simulator.report import SimulationReport, alone, make_plan, make_report, plan_text
from octavo.workload.job import Job
from octavo.workload.measures import Gaps, Served, Targets

JOBS = [Job(float(place), 10, 2) for place in range(1000)]
TARGETS = Targets.parse("ttft_p99<1s")


def _report(ttft: float) -> SimulationReport:
    served = [Served(Job(0.0, 10, 2), ttft, ttft + 1.0, 2)]
    return make_report(SimulationOutcome(served, Gaps(), 1.0, 1, 1.0, 0, 0), TARGETS)


class _Planted:
    """First tokens take so long with so many replicas, and `idle_s` where requests come one by one."""

    def __init__(self, ttft: Callable[[int], float], idle_s: float = 0.1) -> None:
        self.asked: list[int] = []
        self._ttft = ttft
        self._idle_s = idle_s

    def __call__(self, jobs: Sequence[Job], replicas: int) -> SimulationReport:
        if jobs is not JOBS:
            assert replicas == 1
            return _report(self._idle_s)
        self.asked.append(replicas)
        return _report(self._ttft(replicas))


@pytest.mark.parametrize("needed", [1, 2, 3, 7, 8, 9, 100, 511])
def test_the_smallest_number_is_found_with_few_simulations(needed: int) -> None:
    run = _Planted(lambda replicas: (needed - 0.5) / replicas)
    plan = make_plan(run, JOBS, 1, 512)
    assert plan.replicas == needed
    assert len(run.asked) == len(set(run.asked)) <= 2 * needed.bit_length() + 3
    assert {needed - 1, needed, needed + 1} - {0} <= set(run.asked)
    assert [each.replicas for each in plan.tried] == sorted(run.asked)


def test_the_search_begins_at_the_least_number_that_may_be() -> None:
    run = _Planted(lambda replicas: 0.5)
    assert make_plan(run, JOBS, 4, 64).replicas == 4
    assert sorted(run.asked) == [4, 5]


def test_a_number_that_suffices_by_chance_is_not_the_answer() -> None:
    # By halving, 6 is found; but 7 does not suffice.
    run = _Planted(lambda replicas: 0.5 if replicas in (6, 8, 9, 10) or replicas > 11 else 2.0)
    assert make_plan(run, JOBS, 1, 64).replicas == 8


def test_the_largest_number_needs_no_larger_one() -> None:
    assert make_plan(_Planted(lambda replicas: 12 / replicas * 0.99), JOBS, 1, 12).replicas == 12


def test_targets_that_an_idle_replica_misses_are_met_by_none() -> None:
    run = _Planted(lambda replicas: 3.0, idle_s=1.5)
    plan = make_plan(run, JOBS, 1, 64)
    assert plan.replicas is None
    assert run.asked == [64]
    assert plan_text(plan, TARGETS, 1, 64).endswith(
        "no number of replicas from 1 to 64 keeps ttft_p99<1 s, because even on an idle replica ttft_p99 is 1.5 s, not"
        " below 1 s"
    )


def test_a_limit_that_is_too_low_is_told_with_what_was_tried() -> None:
    plan = make_plan(_Planted(lambda replicas: 100 / replicas), JOBS, 1, 6)
    assert plan.replicas is None
    assert plan_text(plan, TARGETS, 1, 6).splitlines() == [
        "1 replica: ttft_p99 is 100 s, not below 1 s",
        "2 replicas: ttft_p99 is 50 s, not below 1 s",
        "4 replicas: ttft_p99 is 25 s, not below 1 s",
        "6 replicas: ttft_p99 is 16.7 s, not below 1 s",
        "",
        "no number of replicas from 1 to 6 keeps ttft_p99<1 s",
    ]


def test_a_sample_of_the_jobs_never_meets_itself() -> None:
    few = alone(JOBS)
    assert len(few) == 100
    assert all(later.arrival_s - sooner.arrival_s >= 1e4 for sooner, later in pairwise(few))
    assert alone(JOBS[:3]) == [Job(place * 1e5, 10, 2) for place in range(3)]


def test_a_plan_tells_what_it_tries_at_once_and_the_figures_of_what_it_found() -> None:
    told: list[str] = []
    run = _Planted(lambda replicas: 2.5 / replicas)
    plan = make_plan(run, JOBS, 1, 64, lambda tried: told.append(str(tried)))
    assert told[0] == "1 replica: ttft_p99 is 2.5 s, not below 1 s"
    assert len(told) == len(run.asked)
    text = plan_text(plan, TARGETS, 1, 64)
    _, answer, figures = text.split("\n\n")
    assert answer == "ttft_p99<1 s: 3 replicas"
    assert figures.startswith("1 of 1 requests finished")
    assert "833 ms" in figures
    assert figures.endswith("replicas busy 100.0% of the time")
