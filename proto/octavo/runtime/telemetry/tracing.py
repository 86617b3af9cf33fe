"""Traces a request through the processes as spans, which cost next to nothing where no collector is configured."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from octavo.runtime.telemetry.optional import TRACES, failed

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

Attribute = str | int | float


class Span:
    """Records a stretch of a request's life in one process. Attributes are numbers and names, never prompts or
    outputs."""

    __slots__ = ()

    @property
    def traceparent(self) -> str:
        """Returns the name of the span for other processes (W3C trace context); it is empty if nothing is traced."""
        return ""

    def event(self, name: str, **attributes: Attribute) -> None:
        """Records that something happened now."""

    def set(self, **attributes: Attribute) -> None:
        """Adds attributes."""

    def end(self, error: str = "") -> None:
        """Ends the span; `error` is a stable reason if the stretch failed. Idempotent."""


# The span of what is not traced.
NOTHING: Final = Span()

StartSpan = Callable[[str, str, dict[str, Attribute]], Span]

_start: StartSpan | None = None
_provider: "TracerProvider | None" = None


def configure(endpoint: str, service_name: str) -> None:
    """Exports this process's spans from now on to the OTLP collector at `endpoint` (gRPC; host:port or
    http(s)://host:port), from a thread of its own; while the collector is away spans are dropped. Raises
    `ModuleNotFoundError` without OpenTelemetry."""
    global _start, _provider
    from octavo.runtime.telemetry import otlp

    close()
    _provider = otlp.provider(endpoint, service_name)
    _start = otlp.span_starter(_provider)


def close() -> None:
    """Sends what is left, for a moment, and traces nothing from now on."""
    global _start, _provider
    provider, _provider, _start = _provider, None, None
    if provider is not None:
        try:
            provider.shutdown()
        except Exception as error:
            failed(TRACES, error, "the last spans are lost")


@contextmanager
def exported(endpoint: str, service_name: str) -> Iterator[None]:
    """Calls `configure` for as long as the block takes; nothing is traced if `endpoint` is empty, or is none.

    Raises `ModuleNotFoundError` without OpenTelemetry.
    """
    if endpoint:
        try:
            configure(endpoint, service_name)
        except ModuleNotFoundError:
            raise
        except Exception as error:
            failed(TRACES, error, "nothing is traced")
    try:
        yield
    finally:
        close()


def start_span(name: str, traceparent: str = "", **attributes: Attribute) -> Span:
    """Starts a span now, as a part of `traceparent` if that is not empty."""
    return NOTHING if _start is None else _start(name, traceparent, attributes)
