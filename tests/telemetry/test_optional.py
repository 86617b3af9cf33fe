"""What no request needs fails into a counter and one line, and says when it works again."""

import logging

import pytest

from octavo.runtime.telemetry import optional, tracing
from octavo.runtime.telemetry.numbers import Tally
from octavo.runtime.telemetry.optional import EVENT_LOG, TRACES, failed, tolerated, worked
from octavo.testing.fakes.otlp_collector import otlp_collector


@pytest.fixture(autouse=True)
def nothing_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "_failures", Tally(EVENT_LOG, TRACES))
    monkeypatch.setattr(optional, "_failing", set())


def counted(what: str) -> float:
    return sum(sample.value for sample in optional.family().samples if sample.labels == {"what": what})


def test_each_failure_is_counted_and_the_first_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for number in range(3):
        failed(EVENT_LOG, OSError(f"error {number}"), "it ends")
    failed(TRACES, "no answer", "spans are lost")
    assert caplog.messages == ["event log: error 0; it ends", "traces: no answer; spans are lost"]
    assert (counted(EVENT_LOG), counted(TRACES)) == (3, 1)


def test_what_works_again_says_so_once_and_may_fail_anew(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    worked(TRACES)
    for _ in range(2):
        failed(TRACES, "no answer", "spans are lost")
        worked(TRACES)
        worked(TRACES)
    assert caplog.messages == ["traces: no answer; spans are lost", "traces: works again"] * 2


def test_whatever_is_raised_goes_no_further_but_an_end_does() -> None:
    with tolerated(EVENT_LOG, "it ends"):
        raise ValueError("any fault")
    assert counted(EVENT_LOG) == 1
    with pytest.raises(KeyboardInterrupt), tolerated(EVENT_LOG, "it ends"):
        raise KeyboardInterrupt
    assert counted(EVENT_LOG) == 1


def test_all_are_told_from_the_start() -> None:
    assert {sample.labels["what"] for sample in optional.family().samples} == {EVENT_LOG, TRACES}


def export(address: str, spans: int) -> None:
    with tracing.exported(address, "test-service"):
        for _ in range(spans):
            tracing.start_span("request").end()


def test_a_collector_that_is_away_is_said_once_and_that_it_is_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    for seconds in (0.2, 0.2):
        monkeypatch.setattr("octavo.runtime.telemetry.otlp._EXPORT_TIMEOUT_S", seconds)
        export("127.0.0.1:9", 1)
    monkeypatch.setattr("octavo.runtime.telemetry.otlp._EXPORT_TIMEOUT_S", 60.0)
    assert counted(TRACES) == 2
    with otlp_collector() as collector:
        export(collector.address, 1)
        assert len(collector.wait_for(1)) == 1
    lost = "traces: the collector at 127.0.0.1:9: no answer, or a refusal; spans are lost until it takes them again"
    assert caplog.messages == [lost, "traces: works again"]


def test_an_address_that_is_none_keeps_nobody_from_serving(caplog: pytest.LogCaptureFixture) -> None:
    with tracing.exported("http://[", "test-service"):
        assert tracing.start_span("request") is tracing.NOTHING
    assert caplog.messages == ["traces: Invalid IPv6 URL; nothing is traced"]
    assert counted(TRACES) == 1
