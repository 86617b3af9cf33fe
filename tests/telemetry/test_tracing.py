"""Spans reach a collector with the right parents, and cost nothing where none is asked for."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.runtime.telemetry import tracing
from octavo.runtime.telemetry.traceparent import SpanName, parse, write
from octavo.testbed.tiny_model import write_byte_model
from octavo.testing.fakes.otlp_collector import Collector, otlp_collector

CLIENT = SpanName(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, sampled=True)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with otlp_collector() as collector:
        tracing.configure(collector.address, "test-service")
        try:
            yield collector
        finally:
            tracing.close()


def test_without_a_collector_nothing_is_traced() -> None:
    span = tracing.start_span("request", write(CLIENT), model="m")
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
    outer = tracing.start_span("request", write(CLIENT))
    inner = tracing.start_span("schedule", outer.traceparent)
    inner.end()
    outer.end()
    tracing.close()
    by_name = {each.span.name: each.span for each in collector.wait_for(2)}
    assert {span.trace_id.hex() for span in by_name.values()} == {f"{CLIENT.trace_id:032x}"}
    assert by_name["request"].parent_span_id.hex() == f"{CLIENT.span_id:016x}"
    assert by_name["schedule"].parent_span_id == by_name["request"].span_id
    named = parse(outer.traceparent)
    assert named
    assert named.span_id.to_bytes(8) == by_name["request"].span_id


def test_a_trace_that_its_beginner_does_not_record_is_not_recorded_here(collector: Collector) -> None:
    quiet = tracing.start_span("request", write(CLIENT._replace(sampled=False)))
    named = parse(quiet.traceparent)
    assert named
    assert (named.trace_id, named.sampled) == (CLIENT.trace_id, False)
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
