import pytest

from octavo.loadgen.report import LoadReport, Ratio, make_report, ratios, ratios_text
from octavo.loadgen.servers import Record
from octavo.loadgen.session import LoadRun
from octavo.workload.job import Job
from octavo.workload.measures import Gaps


def report(latency_s: float) -> LoadReport:
    """Of one request, without a pause between tokens."""
    record = Record(
        Job(0.0, 4, 2), sent_s=0.0, first_token_s=latency_s / 2, finished_s=latency_s, num_tokens=2, deliveries=2
    )
    return make_report([LoadRun([record], Gaps(), seconds=latency_s)])


def found(first: list[LoadReport], second: list[LoadReport]) -> dict[str, Ratio]:
    return {ratio.metric: ratio for ratio in ratios(first, second)}


def test_a_ratio_is_the_second_by_the_first_in_each_round() -> None:
    compared = found([report(1.0), report(1.0), report(2.0)], [report(2.0), report(4.0), report(2.0)])
    assert compared["latency_p50"] == Ratio("latency_p50", 2.0, 1.0, 4.0)
    assert compared["requests_per_s"] == Ratio("requests_per_s", 0.5, 0.25, 1.0)


def test_what_one_of_them_does_not_have_has_no_ratio() -> None:
    failed = make_report([LoadRun([Record(Job(0.0, 4, 2), sent_s=0.0)], Gaps(), seconds=1.0)])
    assert "ttft_p50" not in found([report(1.0)], [failed])
    # Nothing can be divided by the rate of none.
    assert "requests_per_s" not in found([failed], [report(1.0)])
    assert "itl_p50" not in found([report(1.0)], [report(1.0)])


def test_no_rounds_have_no_ratios() -> None:
    assert ratios([], []) == []


def test_the_table_has_a_line_for_each() -> None:
    head, line = ratios_text([Ratio("ttft_p50", 1.5, 1.25, 2.0)]).splitlines()
    assert head.split() == ["B", "/", "A", "median", "low", "high"]
    assert line.split() == ["ttft_p50", "1.500", "1.250", "2.000"]


def test_rounds_must_be_pairs() -> None:
    with pytest.raises(ValueError, match="zip"):
        ratios([report(1.0)], [])
