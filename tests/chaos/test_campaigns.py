"""Real processes are killed, stopped, drained and left by their clients: every stream gets what it would have got."""

import pytest

from octavo.chaos import poison
from octavo.chaos.campaigns import run
from octavo.chaos.client import KINDS
from octavo.chaos.report import CampaignReport
from octavo.testing.depth import deep

pytestmark = pytest.mark.system

# No stream stands still for ever. How long one does, `make chaos` measures and docs/reliability.md tells.
LONGEST_GAP_S = 60.0


def assert_good(report: CampaignReport) -> None:
    assert report.faults == []
    assert report.whole > 0, "without a stream this proves nothing"
    assert set(report.kinds) <= set(KINDS)


def assert_felt(report: CampaignReport, strikes: int) -> None:
    assert report.figures["strikes"] == strikes
    assert report.figures["streams_disturbed"] > 0
    assert report.figures["gap_max_s"] <= LONGEST_GAP_S


@pytest.mark.parametrize("strikes", [4, *deep(20)])
def test_streams_go_on_when_workers_are_killed(strikes: int) -> None:
    report = run("kill-workers", strikes)
    assert_good(report)
    assert set(report.kinds) == set(KINDS)
    assert_felt(report, strikes)


@pytest.mark.deep
def test_streams_of_a_real_model_go_on_with_the_same_tokens() -> None:
    report = run("kill-real-workers", 3)
    assert_good(report)
    assert report.figures["strikes"] == 3


@pytest.mark.parametrize("strikes", [2, *deep(5)])
def test_streams_go_on_when_the_scheduler_is_killed(strikes: int) -> None:
    report = run("kill-schedulers", strikes)
    assert_good(report)
    assert_felt(report, strikes)


@pytest.mark.deep
def test_streams_go_on_when_a_worker_stands_still_and_it_comes_back() -> None:
    report = run("freeze-workers", 2)
    assert_good(report)
    assert_felt(report, 2)


@pytest.mark.deep
def test_nothing_is_done_for_clients_that_have_gone() -> None:
    report = run("leave", 1)
    assert_good(report)
    assert report.figures["left"] == 200
    assert report.figures["steps_judged"] > 0


@pytest.mark.deep
def test_nobody_notices_that_every_process_is_stopped_and_started_again() -> None:
    report = run("drain", 2)
    assert_good(report)


@pytest.mark.deep
def test_nothing_is_computed_for_clients_whose_time_is_up() -> None:
    report = run("expire", 1)
    assert_good(report)
    assert report.figures["overdue"] > 0
    assert report.figures["overdue_in_queue"] > 0


@pytest.mark.deep
def test_a_poisonous_request_is_put_away_and_no_innocent_with_it() -> None:
    report = run("poison", 5)
    assert_good(report)
    assert report.figures["most_deaths"] <= poison.MAX_DEATHS
    assert report.figures["deaths_by_repetition"] == 0


@pytest.mark.deep
def test_streams_go_on_when_workers_hang_with_the_interpreters_lock_held() -> None:
    report = run("hang-workers", 2)
    assert_good(report)
    assert_felt(report, 2)


@pytest.mark.deep
def test_only_the_request_whose_logits_are_not_finite_fails() -> None:
    report = run("spoil", 5)
    assert_good(report)
    assert report.figures["deaths"] == 0


@pytest.mark.deep
def test_steps_without_memory_are_made_smaller_and_nothing_is_lost() -> None:
    report = run("run-out", 1)
    assert_good(report)
    assert report.figures["deaths"] == 0
