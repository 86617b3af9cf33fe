"""Measures each request from its admission to its end, and reports it to metrics, admission and traces."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.frontend.access.admission import Ticket
from octavo.frontend.errors import ServiceError
from octavo.frontend.request.events import Emitted, Finished, FinishReason, Notice, Started, Usage
from octavo.frontend.scheduler.journal import Journal
from octavo.runtime.telemetry.tracing import Span


@dataclass(frozen=True)
class Latencies:
    """Holds counts and sums (seconds) since the start, of the times to a first token and of those between tokens."""

    first_tokens: int = 0
    first_token_s: float = 0.0
    between_tokens: int = 0
    between_tokens_s: float = 0.0


class Observer:
    """Hears what happens to requests; the metrics are one. Times are in seconds.

    Methods are called in the event loop, and must be quick and not raise.
    """

    def arrived(self) -> None:
        """Counts a request that came; exactly one of `refused`, `finished`, `failed` and `left` follows."""

    def refused(self, error: ServiceError) -> None:
        """Counts a request that ended with `error` before anything was sent."""

    def prompt_tokens(self, count: int, cached: int) -> None:
        """Counts the prompt of a request whose first token is there; `cached` of its tokens were found computed."""

    def first_token(self, since_arrival_s: float) -> None:
        """Measures the time to a request's first token."""

    def tokens(self, count: int, since_last_s: float | None) -> None:
        """Counts new tokens of a request, all sequences together. `since_last_s` is None for the first tokens."""

    def sequence_finished(self, reason: FinishReason) -> None:
        """Counts a sequence that has ended."""

    def finished(self, usage: Usage, since_arrival_s: float) -> None:
        """Counts a request whose last event was handed over."""

    def failed(self, error: ServiceError) -> None:
        """Counts a request that ended with `error` after something was sent."""

    def left(self) -> None:
        """Counts a request whose client went away."""

    def latencies(self) -> Latencies:
        """Returns the latencies observed so far; zeros, where the observer does not count."""
        return Latencies()


class Meter:
    """Measures one request from its admission on. Times are seconds of one monotonic clock."""

    def __init__(self, observer: Observer, ticket: Ticket, span: Span, arrived_at: float) -> None:
        self._observer = observer
        self._ticket = ticket
        self._span = span
        self._arrived_at = arrived_at
        self._sent_any = False
        self._usage: Usage | None = None
        # Generated tokens that are counted, and when the latest of them came.
        self._num_tokens = 0
        self._last_token_at: float | None = None
        self._work_done = 0

    @property
    def traceparent(self) -> str:
        """Returns the W3C trace context of which the spans of other processes are parts."""
        return self._span.traceparent

    def prepared(self, journal: Journal) -> None:
        """Takes the request's work from its journal, once its prompt is tokenized and its limits are resolved."""
        prompt_tokens, sampling = len(journal.prompt_token_ids), journal.sampling
        self._ticket.correct(prompt_tokens + sampling.parallel * sampling.max_tokens)
        self._span.set(prompt_tokens=prompt_tokens, max_tokens=sampling.max_tokens, sequences=sampling.parallel)

    def advanced(self, journal: Journal, num_tokens: int, events: Sequence[Emitted]) -> None:
        """Reports the `events` that were made; `num_tokens` counts the request's generated tokens by now."""
        for emitted in events:
            self._sent_any = True
            match emitted.event:
                case Started():
                    self._started(journal)
                case Finished(reason):
                    self._observer.sequence_finished(reason)
                case Notice(kind):
                    self._span.event(kind.value)
                case Usage() as usage:
                    self._usage = usage
        if num_tokens > self._num_tokens:
            self._tokens(journal, num_tokens - self._num_tokens)

    def ended(self, error: ServiceError | None) -> None:
        """Reports the outcome: `error`, or else an answer that is complete, or a client that has left."""
        if error is not None and not self._sent_any:
            self._observer.refused(error)
        elif error is not None:
            self._observer.failed(error)
        elif self._usage is not None:
            self._observer.finished(self._usage, self._usage.time_to_first_token_s + self._usage.decode_time_s)
        else:
            self._observer.left()
        # Work that is not done now will never be.
        self._ticket.correct(self._work_done)
        self._span.end("" if error is None else error.reason.value)

    def forgotten(self) -> None:
        """Releases the request's share of what is admitted, once nothing of the request is kept."""
        self._ticket.release()

    def _started(self, journal: Journal) -> None:
        prompt_tokens = len(journal.prompt_token_ids)
        self._observer.prompt_tokens(prompt_tokens, journal.cached_prompt_tokens)
        if journal.first_token_at is not None:
            self._observer.first_token(journal.first_token_at - self._arrived_at)
        self._span.event("first_token", cached_prompt_tokens=journal.cached_prompt_tokens)
        self._work(prompt_tokens)

    def _tokens(self, journal: Journal, count: int) -> None:
        now, before = journal.last_token_at, self._last_token_at
        self._observer.tokens(count, None if now is None or before is None else now - before)
        self._num_tokens += count
        self._last_token_at = now
        self._work(count)

    def _work(self, tokens: int) -> None:
        self._work_done += tokens
        self._ticket.progress(tokens)
