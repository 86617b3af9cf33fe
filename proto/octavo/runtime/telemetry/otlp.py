"""Makes spans with OpenTelemetry and exports them over OTLP. Imported only where traces are asked for: its packages are
an extra."""

import logging
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span as OpenTelemetrySpan
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from octavo.runtime.telemetry.optional import TRACES, failed, worked
from octavo.runtime.telemetry.tracing import Attribute, Span, StartSpan

# Of one export: a collector that is away must not keep a process that ends from ending.
_EXPORT_TIMEOUT_S = 5.0
_PREFIX = "octavo."
# One tells of every attempt, the other of every client that sends too long a name.
_QUIET_LOGS = ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.trace.propagation.tracecontext")
# Reads and writes the name by which other processes know a span (W3C trace context), under this key.
_NAMES, _KEY = TraceContextTextMapPropagator(), "traceparent"


class _Traced(Span):
    __slots__ = ("_span",)

    def __init__(self, span: OpenTelemetrySpan) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        carrier: dict[str, str] = {}
        _NAMES.inject(carrier, set_span_in_context(self._span, Context()))
        return carrier[_KEY]

    def event(self, name: str, **attributes: Attribute) -> None:
        self._span.add_event(name, _prefixed(attributes))

    def set(self, **attributes: Attribute) -> None:
        self._span.set_attributes(_prefixed(attributes))

    def end(self, error: str = "") -> None:
        # A span that has ended warns of whatever comes after.
        if not self._span.is_recording():
            return
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class _Tolerant(SpanExporter):
    """Sends what another exporter sends. That it cannot is counted, and said once."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            self._failed(error)
            return SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            worked(TRACES)
        else:
            self._failed("no answer, or a refusal")
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)

    def _failed(self, error: object) -> None:
        failed(TRACES, f"the collector at {self._endpoint}: {error}", "spans are lost until it takes them again")


def provider(endpoint: str, service_name: str) -> TracerProvider:
    """Returns the provider that starts spans. It takes the SDK's usual environment variables into account,
    OTEL_TRACES_SAMPLER and OTEL_RESOURCE_ATTRIBUTES among them."""
    for name in _QUIET_LOGS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    made = TracerProvider(resource=Resource.create({"service.name": service_name}))
    exporter = OTLPSpanExporter(
        endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=_EXPORT_TIMEOUT_S
    )
    # A thread of its own sends; a full queue drops spans.
    made.add_span_processor(BatchSpanProcessor(_Tolerant(exporter, endpoint)))
    return made


def span_starter(made: TracerProvider) -> StartSpan:
    """Returns the implementation of `start_span` that starts spans with `made`."""
    tracer = made.get_tracer("octavo")

    def start(name: str, traceparent: str, attributes: dict[str, Attribute]) -> Span:
        # A context of its own, whatever else the process traces.
        parent = _NAMES.extract({_KEY: traceparent}, Context())
        return _Traced(tracer.start_span(name, parent, kind=SpanKind.SERVER, attributes=_prefixed(attributes)))

    return start


def _prefixed(attributes: dict[str, Attribute]) -> dict[str, Attribute]:
    return {_PREFIX + name: value for name, value in attributes.items()}
