"""Spans reach a collector with the right parents, and cost nothing where none is asked for."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.runtime.telemetry import tracing
from octavo.testbed.tiny_model import write_byte_model
from octavo.testing.fakes.otlp_collector import Collector, otlp_collector

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CLIENT = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with otlp_collector() as collector:
        tracing.configure(collector.address, "test-service")
        try:
            yield collector
        finally:
            tracing.close()


def test_without_a_collector_nothing_is_traced() -> None:
    span = tracing.start_span("request", CLIENT, model="m")
    assert span is tracing.NOTHING
    assert span.traceparent == ""
    span.event("first_token")
    span.end()


def test_a_span_carries_what_it_was_told(collector: Collector) -> None:
    span = tracing.start_span("request", model="m", tokens=3)
    span.event("first_token", count=1)
    span.set(queue_time_s=0.5)
    span.end()
    tracing.close()
    (received,) = collector.wait_for(1)
    assert (received.service, received.span.name) == ("test-service", "request")
    assert received.attributes == {"octavo.model": "m", "octavo.tokens": 3, "octavo.queue_time_s": 0.5}
    assert received.events == ["first_token"]
    assert not received.span.parent_span_id
    assert received.span.status.message == ""


def test_a_span_belongs_to_the_trace_it_is_given(collector: Collector) -> None:
    outer = tracing.start_span("request", CLIENT)
    inner = tracing.start_span("schedule", outer.traceparent)
    inner.end()
    outer.end()
    tracing.close()
    by_name = {each.span.name: each.span for each in collector.wait_for(2)}
    assert {span.trace_id.hex() for span in by_name.values()} == {TRACE}
    assert by_name["request"].parent_span_id.hex() == SPAN
    assert by_name["schedule"].parent_span_id == by_name["request"].span_id
    assert outer.traceparent == f"00-{TRACE}-{by_name['request'].span_id.hex()}-01"


@pytest.mark.parametrize("text", [f" {CLIENT}", f"{CLIENT} ", f"\t {CLIENT}\t\t"])
def test_spaces_and_tabs_around_a_name_do_not_count(collector: Collector, text: str) -> None:
    span = tracing.start_span("request", text)
    span.end()
    tracing.close()
    (received,) = collector.wait_for(1)
    assert (received.span.trace_id.hex(), received.span.parent_span_id.hex()) == (TRACE, SPAN)
    # They are not passed on.
    assert span.traceparent == f"00-{TRACE}-{received.span.span_id.hex()}-01"


def test_later_versions_of_a_name_may_say_more(collector: Collector) -> None:
    tracing.start_span("request", f"01-{TRACE}-{SPAN}-03-more").end()
    tracing.close()
    (received,) = collector.wait_for(1)
    assert (received.span.trace_id.hex(), received.span.parent_span_id.hex()) == (TRACE, SPAN)


@pytest.mark.parametrize(
    "text",
    [
        *("nonsense", f"{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}", f"00-{TRACE}-{SPAN}-1", f"ff-{TRACE}-{SPAN}-01"),
        # Empty ones, and others than spaces and tabs at the ends.
        *("", " ", "\t ", "-", "---", f"\n{CLIENT}", f"\xa0{CLIENT}", f"{CLIENT}\xa0", f"{CLIENT}\0", f'"{CLIENT}"'),
        *(f"00- {TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN} -01", f"00 -{TRACE}-{SPAN}-01", f"{CLIENT},{CLIENT}"),
        *(f"00-{TRACE}-{SPAN}-01-more", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01"),
        *(f"00-{TRACE.upper()}-{SPAN}-01", f"00-{TRACE[:-1]}٣-{SPAN}-01", f"01-{TRACE}-{SPAN}-01-{'long' * 200}"),
    ],
)
def test_what_names_no_span_begins_a_trace_and_is_no_news(
    collector: Collector, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    tracing.start_span("request", text).end()
    tracing.close()
    (received,) = collector.wait_for(1)
    assert received.span.trace_id.hex() != TRACE
    assert not received.span.parent_span_id
    assert caplog.messages == []


def test_a_trace_that_its_beginner_does_not_record_is_not_recorded_here(collector: Collector) -> None:
    for flags in ("00", "fe"):
        quiet = tracing.start_span("request", f"00-{TRACE}-{SPAN}-{flags}")
        assert re.fullmatch(f"00-{TRACE}-[0-9a-f]{{16}}-[0-9a-f][02468ace]", quiet.traceparent)
        quiet.end()
    tracing.start_span("loud").end()
    tracing.close()
    assert [each.span.name for each in collector.wait_for(1)] == ["loud"]


def test_a_failure_is_told_and_an_end_counts_once(collector: Collector) -> None:
    span = tracing.start_span("request", "nonsense")
    span.end("QUEUE_FULL")
    span.end()
    span.event("too late")
    tracing.close()
    (received,) = collector.wait_for(1)
    assert received.span.status.message == "QUEUE_FULL"
    assert received.span.status.code == received.span.status.STATUS_CODE_ERROR
    assert received.events == []


def test_nothing_is_traced_after_the_end(collector: Collector) -> None:
    tracing.close()
    assert tracing.start_span("late") is tracing.NOTHING
    assert collector.spans == []


ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "opentelemetry": raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Absent())
from octavo.cli.main import main
main()
"""


@pytest.mark.parametrize("command", ["scheduler", "frontend", "worker"])
def test_without_its_packages_a_process_says_how_to_install_them(tmp_path: Path, command: str) -> None:
    tmp_path.chmod(0o700)
    write_byte_model(tmp_path / "model")
    environment = {
        **os.environ,
        "OCTAVO_RUNTIME_DIR": str(tmp_path),
        "OCTAVO_MODEL": str(tmp_path / "model"),
        "OCTAVO_DEVICE": "fake",
        "OCTAVO_OTLP_ENDPOINT": "http://localhost:4317",
    }
    result = subprocess.run(
        [sys.executable, "-c", ABSENT, command], env=environment, capture_output=True, text=True, timeout=60
    )
    what = "needs opentelemetry, which is not installed; in Octavo's source tree run: pip install '.[tracing]'"
    assert result.stderr.splitlines()[-1] == f"Error: `octavo {command}` {what}"
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
