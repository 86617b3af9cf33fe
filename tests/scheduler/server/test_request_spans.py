"""Traces of requests: each has one span while the core holds it, whatever becomes of it."""

from collections.abc import Iterator

import msgspec
import pytest

from octavo.runtime.telemetry import tracing
from octavo.scheduler.core.config import Preemption
from octavo.scheduler.server.metrics import RequestSpans, SchedulerMetrics
from octavo.testing.cluster import Cluster, make_request, resubmitted
from octavo.testing.fakes.otlp_collector import Collector, Received, otlp_collector
from octavo.wire.requests import Request
from octavo.wire.steps import StepPlan

from ..conftest import MakeCluster

PARENT = f"00-{0xABC:032x}-{0xDEF:016x}-01"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with otlp_collector() as collector:
        tracing.configure(collector.address, "octavo-scheduler")
        try:
            yield collector
        finally:
            tracing.close()


class Traced:
    """A cluster whose requests come as the shell hands them over."""

    def __init__(self, make_cluster: MakeCluster, collector: Collector, **config: object) -> None:
        self.spans = RequestSpans(lambda: self.cluster.now)
        metrics = SchedulerMetrics(lambda: 0.0, self.spans)
        self.cluster: Cluster = make_cluster(observer=metrics, **config)
        self._collector = collector

    def submit(self, request: Request, traceparent: str = PARENT) -> Request:
        request = self.spans.begin(msgspec.structs.replace(request, traceparent=traceparent))
        self.cluster.submit(request)
        return request

    def ended(self, count: int) -> list[Received]:
        """The spans of requests that have ended, which must be all; not those of the workers' sequences."""
        assert len(self.spans) == 0
        # Sends what is left.
        tracing.close()
        found = [received for received in self._collector.spans if received.span.name == "schedule"]
        assert len(found) == count
        return found


def test_a_span_tells_how_long_its_request_waited(make_cluster: MakeCluster, collector: Collector) -> None:
    traced = Traced(make_cluster, collector)
    request = traced.submit(make_request("a", 8, 4))
    traced.cluster.now += 3
    replica = traced.cluster.join()
    traced.cluster.run()
    (received,) = traced.ended(1)
    assert received.span.name == "schedule"
    assert received.attributes == {
        "octavo.request_id": "a",
        "octavo.attempt": 1,
        "octavo.prompt_tokens": 8,
        "octavo.queue_time_s": 3.0,
    }
    assert received.events == ["admitted"]
    assert (received.span.trace_id.hex(), received.span.parent_span_id.hex()) == (f"{0xABC:032x}", f"{0xDEF:016x}")
    starts = [start for plan in replica.received if isinstance(plan, StepPlan) for start in plan.starts]
    assert [start.traceparent for start in starts] == [request.traceparent] != [PARENT]
    assert received.span.span_id.hex() in request.traceparent


def test_what_a_request_loses_and_gets_back_is_an_event(make_cluster: MakeCluster, collector: Collector) -> None:
    traced = Traced(make_cluster, collector, preemption=Preemption.SWAP, watermark=0.0)
    traced.cluster.join(1, num_blocks=6, block_size=4, num_cpu_blocks=6)
    traced.submit(make_request("a", 8, 12))
    traced.submit(make_request("b", 8, 12))
    traced.cluster.run()
    events = [received.events for received in traced.ended(2)]
    assert ["admitted"] in events
    assert any(event[:2] == ["admitted", "preempted"] for event in events)


def test_a_lost_worker_is_an_event(make_cluster: MakeCluster, collector: Collector) -> None:
    traced = Traced(make_cluster, collector)
    traced.cluster.join(1)
    traced.submit(make_request("a", 8, 12))
    traced.cluster.step()
    traced.cluster.leave(1)
    traced.cluster.join(2)
    traced.cluster.run()
    assert [received.events for received in traced.ended(1)] == [["admitted", "worker_lost"]]


def test_every_span_ends_however_its_request_does(make_cluster: MakeCluster, collector: Collector) -> None:
    traced = Traced(make_cluster, collector, max_waiting=3)
    first = make_request("again", 8, 4)
    traced.submit(first)
    # The same once more, which the core ignores; and a later attempt, in whose favour it drops the former.
    traced.submit(first)
    traced.submit(resubmitted(first))
    for name in ("aborted", "forgotten", "too many"):
        traced.submit(make_request(name, 8, 4))
    assert len(traced.spans) == 3
    traced.cluster.abort("aborted")
    traced.cluster.tick(1e6)
    found = traced.ended(6)
    assert sorted(received.span.status.message for received in found) == ["", "", "", "", "", "queue_full"]
    assert {received.attributes["octavo.request_id"] for received in found} == {
        *("again", "aborted", "forgotten", "too many")
    }


@pytest.mark.parametrize("traceparent", ["", PARENT])
def test_without_a_collector_requests_stay_as_they_are(traceparent: str) -> None:
    spans = RequestSpans(lambda: 0.0)
    request = msgspec.structs.replace(make_request("a", 8, 4), traceparent=traceparent)
    assert spans.begin(request) is request
    assert len(spans) == 0


def test_a_request_that_nobody_traces_is_not_traced_here(collector: Collector) -> None:
    spans = RequestSpans(lambda: 0.0)
    request = make_request("a", 8, 4)
    assert spans.begin(request) is request
