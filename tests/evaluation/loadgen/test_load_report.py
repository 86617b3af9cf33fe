import pytest

from octavo.loadgen.report import LoadReport, make_report, report_text
from octavo.loadgen.servers import Failure, Record
from octavo.loadgen.session import LoadRun
from octavo.workload.job import Job
from octavo.workload.measures import Gaps, Targets


def served(arrival_s: float = 0.0, *, lag_s: float = 0.0, ttft: float = 0.1, tokens: int = 5) -> Record:
    """A request that asked for five tokens and was answered in a second."""
    return Record(
        Job(arrival_s, 10, 5),
        sent_s=arrival_s + lag_s,
        first_token_s=arrival_s + ttft,
        finished_s=arrival_s + 1.0,
        num_tokens=tokens,
        deliveries=tokens,
        prompt_tokens=10,
    )


def failed(kind: str, detail: str = "") -> Record:
    return Record(Job(0.0, 10, 5), sent_s=0.0, failure=Failure(kind, detail))


def report_of(*records: Record, targets: str | None = None, interrupted: bool = False) -> LoadReport:
    run = LoadRun(list(records), Gaps(), seconds=2.0, interrupted=interrupted)
    return make_report([run], Targets.parse(targets) if targets else None)


def test_errors_are_counted_by_their_kind_with_what_the_first_was_told() -> None:
    report = report_of(failed("HTTP 429", "a"), served(), failed("timeout"), failed("HTTP 429", "b"))
    assert [(error.kind, error.count, error.example) for error in report.errors] == [
        ("HTTP 429", 2, "a"),
        ("timeout", 1, ""),
    ]
    assert (report.summary.failed, report.summary.finished, report.all_failed) == (3, 1, False)
    assert "failed 2: HTTP 429 (a)\nfailed 1: timeout\n" in report_text(report)


def test_it_says_when_all_failed() -> None:
    assert report_of(failed("timeout")).all_failed


def test_nothing_has_failed_where_nothing_was_sent() -> None:
    report = report_of(Record(Job(0.0, 1, 1)), interrupted=True)
    assert not report.all_failed
    assert "interrupted: 1 requests not sent, 0 still under way" in report_text(report)


def test_requests_that_were_not_sent_are_none_of_those_measured() -> None:
    under_way = Record(Job(0.0, 10, 5), sent_s=0.0)
    report = report_of(served(), under_way, Record(Job(9.0, 1, 1)), interrupted=True)
    assert (report.summary.requests, report.unfinished, report.unsent) == (2, 1, 1)


@pytest.mark.parametrize(("lag_s", "late"), [(0.01, False), (0.2, True)])
def test_it_says_whether_the_generator_kept_up(lag_s: float, late: bool) -> None:
    report = report_of(*(served(lag_s=lag_s) for _ in range(20)))
    assert report.lag is not None
    assert report.lag.p50 == pytest.approx(lag_s)
    assert report.late == late
    assert ("could not keep up" in report_text(report)) == late


def test_answers_shorter_than_asked_are_told() -> None:
    report = report_of(served(), served(tokens=3))
    assert report.short == 1
    assert "1 answers were shorter than asked" in report_text(report)
    assert report.summary.output_tokens_per_s == 4.0


def test_tokens_that_come_together_are_told() -> None:
    record = served()
    record.deliveries = 2
    assert report_of(record).tokens_per_delivery == 2.5


def test_what_the_server_had_computed_before_is_told() -> None:
    record = served()
    record.cached_tokens = 8
    report = report_of(record, served())
    assert report.cached_share == 0.4
    assert "40.0% of the prompts' tokens were in the server's prefix cache" in report_text(report)


def test_goodput_is_of_the_requests_that_kept_every_limit() -> None:
    report = report_of(served(), served(ttft=0.5), failed("timeout"), targets="ttft<200ms,latency_p50<2s")
    assert (report.summary.good, report.summary.goodput_per_s) == (1, 0.5)
    assert len(report.unmet) == 2
    assert "target missed: 1 of 2 requests missed ttft<200 ms" in report_text(report)


def test_runs_are_put_together() -> None:
    runs = [LoadRun([served(ttft=ttft)], Gaps(), seconds=2.0) for ttft in (0.1, 0.3)]
    for run, pause in zip(runs, (0.01, 0.03), strict=True):
        run.gaps.add(pause)
    summary = make_report(runs).summary
    assert (summary.requests, summary.seconds, summary.requests_per_s) == (2, 4.0, 0.5)
    assert summary.ttft is not None
    assert summary.itl is not None
    assert summary.ttft.mean == pytest.approx(0.2)
    assert summary.itl.mean == pytest.approx(0.02)
