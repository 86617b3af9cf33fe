"""What the traces of requests tell of the scheduler: how long each waited, and what it lost."""

from collections.abc import Callable

import msgspec

from octavo.runtime.telemetry.tracing import Span, start_span
from octavo.wire.requests import Request


class RequestSpans:
    """The spans of requests that the core holds, by the names that they carry there in place of the frontends'."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # With the time of their beginning.
        self._spans: dict[str, tuple[Span, float]] = {}

    def __len__(self) -> int:
        return len(self._spans)

    def begin(self, request: Request) -> Request:
        """The request as the core is to see it: if it is traced here, under a span of its own."""
        if not request.traceparent:
            return request
        span = start_span(
            "schedule",
            request.traceparent,
            request_id=request.request_id,
            attempt=request.attempt,
            prompt_tokens=len(request.prompt_token_ids),
        )
        if not span.traceparent:
            return request
        self._spans[span.traceparent] = span, self._clock()
        return msgspec.structs.replace(request, traceparent=span.traceparent)

    def happened(self, traceparent: str, event: str) -> None:
        """`SchedulerObserver.traced`."""
        if held := self._spans.get(traceparent):
            span, began_at = held
            span.event(event)
            if event == "admitted":
                span.set(queue_time_s=self._clock() - began_at)

    def ended(self, traceparent: str, error: str) -> None:
        """`SchedulerObserver.ended`."""
        if held := self._spans.pop(traceparent, None):
            held[0].end(error)
