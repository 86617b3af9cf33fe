"""An OpenTelemetry collector that only keeps what it is sent."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True)
class Received:
    """A span, and the service whose it is."""

    service: str
    span: Span

    @property
    def attributes(self) -> dict[str, object]:
        return {each.key: _value(each.value) for each in self.span.attributes}

    @property
    def events(self) -> list[str]:
        return [event.name for event in self.span.events]


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """`address` is where it listens."""

    address: str = ""
    spans: list[Received] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def Export(self, request: Any, context: Any) -> Any:
        with self._changed:
            for resource in request.resource_spans:
                names = [each.value.string_value for each in resource.resource.attributes if each.key == "service.name"]
                self.spans += [Received(names[0], span) for scope in resource.scope_spans for span in scope.spans]
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, count: int, seconds: float = 60.0) -> list[Received]:
        """Returns once so many spans are there; fails after a while."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while len(self.spans) < count:
                assert self._changed.wait(deadline - time.monotonic()), f"{len(self.spans)} of {count} spans came"
            return list(self.spans)


def _value(value: Any) -> object:
    return getattr(value, value.WhichOneof("value"))


@contextmanager
def otlp_collector() -> Iterator[Collector]:
    """Runs a collector that listens inside the block."""
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
