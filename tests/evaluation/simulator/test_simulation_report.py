"""What is told of a simulation."""

import pytest

from octavo.simulator.cell import Sample
from octavo.simulator.engine import SimulationOutcome
from octavo.simulator.report import make_report, report_text, sparkline
from octavo.workload.job import Job
from octavo.workload.measures import ErrorCount, Gaps, Served, Targets


def _outcome(*served: Served) -> SimulationOutcome:
    gaps = Gaps()
    gaps.add(0.02, 9)
    samples = [Sample(float(time), time, 2 * time, 0, 2 * time, 10 * time, 0, 100) for time in range(5)]
    return SimulationOutcome(list(served), gaps, 4.0, 40, 0.5, 3, 1, samples)


DONE = Served(Job(0.0, 100, 10), 1.0, 2.0, 10)
REFUSED = Served(Job(0.0, 5000, 10), error="prompt_too_long: 5010 tokens exceed the context of 2048")


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([0.0, 1.0, 8.0, 4.0], 4, " ▁█▄"),
        ([0.0, 0.0], 4, "  "),
        ([1.0, 8.0, 2.0, 2.0], 2, "█▂"),
        ([0.0, 0.001, 1000.0], 3, " ▁█"),
    ],
)
def test_a_curve_keeps_its_peaks_and_is_blank_only_where_there_is_nothing(
    values: list[float], width: int, drawn: str
) -> None:
    assert sparkline(values, width) == drawn


def test_refused_requests_are_counted_by_kind_with_the_first_of_each() -> None:
    full = Served(Job(0.0, 1, 1), error="queue_full: 1 of 1")
    report = make_report(_outcome(DONE, REFUSED, full, Served(Job(0.0, 1, 1), error="queue_full: later")))
    assert report.errors == [
        ErrorCount("queue_full", 2, "1 of 1"),
        ErrorCount("prompt_too_long", 1, "5010 tokens exceed the context of 2048"),
    ]
    assert "refused 2: queue_full (1 of 1)" in report_text(report)


def test_targets_that_are_missed_are_told() -> None:
    report = make_report(_outcome(DONE), Targets.parse("ttft_p99<500ms,itl_p99<1s"))
    assert report.unmet == ["ttft_p99 is 1 s, not below 500 ms"]
    assert report_text(report).endswith("target missed: ttft_p99 is 1 s, not below 500 ms")


def test_the_page_tells_of_steps_and_of_use_over_time() -> None:
    lines = report_text(make_report(_outcome(DONE))).splitlines()
    assert "40 steps, replicas busy 50.0% of the time; 3 preemptions, 1 of them swaps" in lines
    (waiting,) = [line for line in lines if line.startswith("waiting requests")]
    assert waiting.split()[2:4] == ["2.0", "4"]
    (blocks,) = [line for line in lines if line.startswith("blocks in use")]
    assert blocks.split()[4:6] == ["20.0", "40"]


def test_without_samples_nothing_is_drawn() -> None:
    outcome = _outcome(DONE)
    outcome.samples = []
    assert "over time" not in report_text(make_report(outcome))
